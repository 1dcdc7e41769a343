"""Remember what the training-health checks found of an experiment."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    """Go forward."""
    op.add_column("experiments", sa.Column("health", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    """Go back."""
    op.drop_column("experiments", "health")
