"""Old usage is found by its time: rows lie in that order, more or less, so a small index does."""

from alembic import op

revision = "0004"
down_revision = "0003"

UP = """
CREATE INDEX usage_at ON usage USING brin (at) WITH (pages_per_range = 16);
"""


def upgrade() -> None:
    op.execute(UP)
