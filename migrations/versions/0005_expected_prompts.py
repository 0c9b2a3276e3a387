"""What a waiting run asks for, so that any worker can put it into its line without reading the conversation."""

from alembic import op

revision = "0005"
down_revision = "0004"

UP = """
ALTER TABLE runs ADD COLUMN expected_prompt_tokens integer NOT NULL DEFAULT 0;
"""


def upgrade() -> None:
    op.execute(UP)
