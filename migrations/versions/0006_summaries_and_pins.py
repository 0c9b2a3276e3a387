"""Summaries that stand for the older part of a branch, pinned messages, and what each reply's prompt was made of."""

from alembic import op

revision = "0006"
down_revision = "0005"

UP = """
-- Never changed, only added to: another text is another version. Which one a branch uses is found by walking up from
-- its leaf to the first message that is some summary's last.
CREATE TABLE summaries (
    id                  text COLLATE "C" PRIMARY KEY,
    user_id             text COLLATE "C" NOT NULL,
    conversation_id     text COLLATE "C" NOT NULL,
    through_message_id  text COLLATE "C" NOT NULL,
    version             integer NOT NULL CHECK (version >= 1),
    -- The summary that this one was made from; none for a branch's first.
    previous_id         text COLLATE "C",
    text                text NOT NULL,
    tokens              integer NOT NULL,
    -- Written by the user, not by a model.
    edited              boolean NOT NULL DEFAULT false,
    model               text,
    created_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (conversation_id, through_message_id, version),
    FOREIGN KEY (user_id, conversation_id) REFERENCES conversations (user_id, id) ON DELETE CASCADE,
    FOREIGN KEY (conversation_id, through_message_id) REFERENCES messages (conversation_id, id)
);

ALTER TABLE messages ADD COLUMN pinned boolean NOT NULL DEFAULT false;
CREATE INDEX messages_pinned ON messages (conversation_id) WHERE pinned;

ALTER TABLE runs ADD COLUMN context jsonb;
"""


def upgrade() -> None:
    op.execute(UP)
