"""How often a run was lost with its worker, or failed by its engine: attempts count what merely gave way, too."""

from alembic import op

revision = "0012"
down_revision = "0011"

UP = """
ALTER TABLE runs ADD COLUMN losses integer NOT NULL DEFAULT 0;
"""


def upgrade() -> None:
    op.execute(UP)
