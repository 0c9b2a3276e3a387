"""Runs that fold: they write a summary instead of a message, in the background."""

from alembic import op

revision = "0008"
down_revision = "0007"

UP = """
ALTER TABLE runs
    ADD COLUMN kind text NOT NULL DEFAULT 'reply' CHECK (kind IN ('reply', 'fold')),
    -- The last message that a fold's summary is to stand for, and the summary it goes on from; none for a first one.
    ADD COLUMN fold_through_id text COLLATE "C",
    ADD COLUMN fold_base_id text COLLATE "C",
    ALTER COLUMN user_message_id DROP NOT NULL,
    ALTER COLUMN message_id DROP NOT NULL,
    ALTER COLUMN client_msg_id DROP NOT NULL,
    ALTER COLUMN request_hash DROP NOT NULL,
    ADD FOREIGN KEY (conversation_id, fold_through_id) REFERENCES messages (conversation_id, id),
    ADD CONSTRAINT runs_have_what_their_kind_has CHECK (CASE kind
        WHEN 'reply' THEN user_message_id IS NOT NULL AND message_id IS NOT NULL AND client_msg_id IS NOT NULL
            AND request_hash IS NOT NULL AND fold_through_id IS NULL AND fold_base_id IS NULL
        ELSE user_message_id IS NULL AND message_id IS NULL AND client_msg_id IS NULL AND request_hash IS NULL
            AND continues_message_id IS NULL AND fold_through_id IS NOT NULL
        END);
-- One at a time in a conversation, however many replicas think of it.
CREATE UNIQUE INDEX runs_one_fold ON runs (conversation_id) WHERE kind = 'fold' AND status IN ('queued', 'streaming');
CREATE INDEX runs_by_fold ON runs (conversation_id, fold_through_id) WHERE fold_through_id IS NOT NULL;

-- What the service used of its own accord for a user. It takes nothing off the user's budget.
ALTER TABLE usage ADD COLUMN background_units double precision NOT NULL DEFAULT 0;
"""


def upgrade() -> None:
    op.execute(UP)
