"""The index of old passages for recall, and what of it is still to be made."""

from alembic import op

revision = "0010"
down_revision = "0009"

UP = """
CREATE TABLE recall_chunks (
    id                  bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    user_id             text COLLATE "C" NOT NULL,
    conversation_id     text COLLATE "C" NOT NULL,
    -- The chunk that this one goes on from; none for the first of a branch. They go together, with the conversation.
    previous_id         bigint,
    through_message_id  text COLLATE "C" NOT NULL,
    -- Of the terms in it.
    version             integer NOT NULL,
    -- Of each passage: which message, from which character, up to which.
    message_ids         text[] NOT NULL,
    starts              integer[] NOT NULL,
    ends                integer[] NOT NULL,
    words               bytea NOT NULL,
    embedder            text,
    vectors             bytea,
    UNIQUE (conversation_id, through_message_id, version),
    FOREIGN KEY (user_id, conversation_id) REFERENCES conversations (user_id, id) ON DELETE CASCADE,
    FOREIGN KEY (conversation_id, through_message_id) REFERENCES messages (conversation_id, id),
    CHECK (cardinality(message_ids) = cardinality(starts) AND cardinality(message_ids) = cardinality(ends)),
    CHECK ((embedder IS NULL) = (vectors IS NULL))
);
-- Numbers that do not get smaller; unpacking them would take longer than reading them.
ALTER TABLE recall_chunks ALTER words SET STORAGE EXTERNAL, ALTER vectors SET STORAGE EXTERNAL;

CREATE TABLE recall_due (
    conversation_id     text COLLATE "C" PRIMARY KEY,
    user_id             text COLLATE "C" NOT NULL,
    through_message_ids text[] COLLATE "C" NOT NULL,
    -- Later than now: somebody works on it until then.
    due_at              timestamptz NOT NULL DEFAULT clock_timestamp(),
    FOREIGN KEY (user_id, conversation_id) REFERENCES conversations (user_id, id) ON DELETE CASCADE
);
CREATE INDEX recall_due_by_time ON recall_due (due_at);
"""


def upgrade() -> None:
    op.execute(UP)
