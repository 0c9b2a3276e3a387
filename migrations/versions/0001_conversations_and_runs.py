"""Users, conversations, messages, runs, workers, secrets.

Everything a user owns carries ``user_id``, so that the tables can be sharded by it; a foreign key over both columns
keeps it equal to the conversation's. Ids sort by byte (COLLATE "C"): they are ASCII, and byte order is time order.
What is rewritten while a reply runs (runs, messages, users) keeps room in its pages (fillfactor) and has no index on
what changes, so that those updates stay within the page (HOT).
"""

from alembic import op

revision = "0001"
down_revision = None

UP = """
CREATE TABLE users (
    id          text COLLATE "C" PRIMARY KEY,
    tier        text NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    seen_at     timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 80);

CREATE TABLE conversations (
    id              text COLLATE "C" PRIMARY KEY,
    user_id         text COLLATE "C" NOT NULL REFERENCES users ON DELETE CASCADE,
    title           text,
    system_prompt   text,
    model           text,
    head_message_id text COLLATE "C",
    pinned          boolean NOT NULL DEFAULT false,
    temporary       boolean NOT NULL DEFAULT false,
    created_at      timestamptz NOT NULL DEFAULT now(),
    updated_at      timestamptz NOT NULL DEFAULT now(),
    UNIQUE (user_id, id)
);
CREATE INDEX conversations_by_activity ON conversations (user_id, updated_at DESC, id DESC) WHERE NOT temporary;
CREATE INDEX conversations_temporary ON conversations (updated_at) WHERE temporary;

CREATE TABLE messages (
    id              text COLLATE "C" PRIMARY KEY,
    user_id         text COLLATE "C" NOT NULL,
    conversation_id text COLLATE "C" NOT NULL,
    parent_id       text COLLATE "C",
    role            text NOT NULL CHECK (role IN ('system', 'user', 'assistant', 'tool')),
    content         text NOT NULL,
    status          text NOT NULL CHECK (status IN ('queued', 'streaming', 'complete', 'stopped', 'failed')),
    model           text,
    response_id     text COLLATE "C",
    finish_reason   text,
    error_code      text,
    tokens          integer,
    created_at      timestamptz NOT NULL,
    UNIQUE (conversation_id, id),
    FOREIGN KEY (user_id, conversation_id) REFERENCES conversations (user_id, id) ON DELETE CASCADE,
    -- A parent is a message of the same conversation, whatever the code above this thinks.
    FOREIGN KEY (conversation_id, parent_id) REFERENCES messages (conversation_id, id)
) WITH (fillfactor = 80);
CREATE INDEX messages_children ON messages (conversation_id, parent_id);

ALTER TABLE conversations ADD FOREIGN KEY (id, head_message_id) REFERENCES messages (conversation_id, id);

CREATE TABLE runs (
    id              text COLLATE "C" PRIMARY KEY,
    user_id         text COLLATE "C" NOT NULL,
    conversation_id text COLLATE "C" NOT NULL,
    user_message_id text COLLATE "C" NOT NULL,
    message_id      text COLLATE "C" NOT NULL,
    client_msg_id   text COLLATE "C" NOT NULL,
    request_hash    bytea NOT NULL,
    model           text NOT NULL,
    tier            text NOT NULL,
    status          text NOT NULL CHECK (status IN ('queued', 'streaming', 'complete', 'stopped', 'failed')),
    attempt         integer NOT NULL DEFAULT 0,
    owner           text COLLATE "C",
    max_tokens      integer,
    temperature     double precision,
    background      boolean NOT NULL DEFAULT false,
    stop_requested  boolean NOT NULL DEFAULT false,
    last_seq        bigint NOT NULL DEFAULT 0,
    -- A checkpoint has saved text. Here, and not read off the message, so that one row decides what a lost run becomes.
    has_text        boolean NOT NULL DEFAULT false,
    finish_reason   text,
    error_code      text,
    error_message   text,
    prompt_tokens   integer NOT NULL DEFAULT 0,
    cached_tokens   integer NOT NULL DEFAULT 0,
    output_tokens   integer NOT NULL DEFAULT 0,
    created_at      timestamptz NOT NULL,
    started_at      timestamptz,
    ended_at        timestamptz,
    -- L8. It goes with the conversation, so the client_msg_ids of a deleted one may be used again.
    UNIQUE (user_id, client_msg_id),
    FOREIGN KEY (user_id, conversation_id) REFERENCES conversations (user_id, id) ON DELETE CASCADE,
    FOREIGN KEY (conversation_id, user_message_id) REFERENCES messages (conversation_id, id),
    FOREIGN KEY (conversation_id, message_id) REFERENCES messages (conversation_id, id),
    CHECK ((status IN ('complete', 'stopped', 'failed')) = (ended_at IS NOT NULL)),
    CHECK (status <> 'streaming' OR owner IS NOT NULL)
) WITH (fillfactor = 70);
CREATE INDEX runs_by_message ON runs (conversation_id, message_id);
CREATE INDEX runs_by_user_message ON runs (conversation_id, user_message_id);
CREATE INDEX runs_by_user ON runs (user_id, created_at);
CREATE INDEX runs_queued ON runs (created_at, id) WHERE status = 'queued';
CREATE INDEX runs_streaming ON runs (owner) WHERE status = 'streaming';
CREATE INDEX runs_open ON runs (user_id) WHERE status IN ('queued', 'streaming');

CREATE TABLE workers (
    id          text COLLATE "C" PRIMARY KEY,
    roles       text[] NOT NULL,
    capacity    integer NOT NULL,
    started_at  timestamptz NOT NULL DEFAULT now(),
    expires_at  timestamptz NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE secrets (
    name        text COLLATE "C" PRIMARY KEY,
    value       bytea NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now()
);
"""


def upgrade():
    op.execute(UP)
