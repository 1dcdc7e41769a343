"""Remember the checkpoint of another experiment that an experiment began from."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    """Go forward."""
    op.add_column("experiments", sa.Column("origin", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    """Go back."""
    op.drop_column("experiments", "origin")
