"""Remember what the training-health checks found of an experiment."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Go forward."""
    op.add_column("experiments", sa.Column("health", sa.JSON(none_as_null=True), nullable=True))
