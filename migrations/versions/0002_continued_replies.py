"""Replies that go on where another one broke off."""

from alembic import op

revision = "0002"
down_revision = "0001"

UP = """
-- The reply whose text this run begins with. No foreign key: a run's rows go with its conversation anyway.
ALTER TABLE runs ADD COLUMN continues_message_id text COLLATE "C";
"""


def upgrade() -> None:
    op.execute(UP)
