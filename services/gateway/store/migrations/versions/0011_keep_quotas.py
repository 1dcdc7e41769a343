"""Remember which token made an experiment, and what each token may have."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Go forward."""
    op.add_column("experiments", sa.Column("created_by", sa.String(64), nullable=True))
    op.add_column("tokens", sa.Column("quota", sa.JSON(none_as_null=True), nullable=True))
