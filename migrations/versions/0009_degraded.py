"""What was given up for a reply because there was too little, and the model asked for where another one answers."""

from alembic import op

revision = "0009"
down_revision = "0008"

UP = """
ALTER TABLE runs
    ADD COLUMN asked_model text,
    ADD COLUMN degraded text[] NOT NULL DEFAULT '{}';
"""


def upgrade() -> None:
    op.execute(UP)
