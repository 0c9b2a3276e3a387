"""Names of deleted runs, until their logs in Redis are known to be gone too."""

from alembic import op

revision = "0007"
down_revision = "0006"

UP = """
CREATE TABLE deleted_runs (
    response_id  text COLLATE "C" PRIMARY KEY,
    deleted_at   timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- A trigger, so that no way of deleting can leave it out: a conversation, a user, or rows by hand.
CREATE FUNCTION note_deleted_runs() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO deleted_runs (response_id) SELECT id FROM gone ON CONFLICT DO NOTHING;
    RETURN NULL;
END
$$;
CREATE TRIGGER note_deleted_runs AFTER DELETE ON runs REFERENCING OLD TABLE AS gone
    FOR EACH STATEMENT EXECUTE FUNCTION note_deleted_runs();
"""


def upgrade() -> None:
    op.execute(UP)
