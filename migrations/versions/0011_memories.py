"""What users want to be known in all their conversations, and as of when a conversation is shown it."""

from alembic import op

revision = "0011"
down_revision = "0010"

UP = """
ALTER TABLE users ADD COLUMN memory_enabled boolean NOT NULL DEFAULT false;

CREATE TABLE memories (
    id          text COLLATE "C" PRIMARY KEY,
    user_id     text COLLATE "C" NOT NULL REFERENCES users ON DELETE CASCADE,
    text        text NOT NULL CHECK (text <> ''),
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX memories_by_user ON memories (user_id, created_at);

-- What was there, and unchanged since, is shown. Null: nothing.
ALTER TABLE conversations ADD COLUMN memory_as_of timestamptz;
"""


def upgrade() -> None:
    op.execute(UP)
