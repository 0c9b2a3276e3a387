"""What users have used, in steps of five minutes: it outlives the conversations in which they used it."""

from alembic import op

revision = "0003"
down_revision = "0002"

UP = """
CREATE TABLE usage (
    user_id         text COLLATE "C" NOT NULL REFERENCES users ON DELETE CASCADE,
    at              timestamptz NOT NULL,
    replies         integer NOT NULL,
    prompt_tokens   bigint NOT NULL,
    cached_tokens   bigint NOT NULL,
    output_tokens   bigint NOT NULL,
    -- Of service: what those tokens cost, at the price of their time.
    units           double precision NOT NULL,
    PRIMARY KEY (user_id, at)
) WITH (fillfactor = 80);

-- What an open run is expected to cost. It counts against its user's budget until the real cost is known.
ALTER TABLE runs ADD COLUMN charged double precision NOT NULL DEFAULT 0;

INSERT INTO usage
    SELECT user_id, date_bin('5 minutes', ended_at, 'epoch'), count(*), sum(prompt_tokens), sum(cached_tokens),
        sum(output_tokens),
        sum(greatest(prompt_tokens - cached_tokens, 0) + 0.1 * cached_tokens + 3.0 * output_tokens)
    FROM runs WHERE ended_at IS NOT NULL GROUP BY 1, 2;
"""


def upgrade() -> None:
    op.execute(UP)
