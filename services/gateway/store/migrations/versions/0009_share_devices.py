"""Remember whose shift it is on shared devices."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    """Go forward."""
    op.add_column("experiments", sa.Column("device_shift", sa.Integer(), nullable=False, server_default="1"))


def downgrade() -> None:
    """Go back."""
    op.drop_column("experiments", "device_shift")
