"""Remember when the notice of a service that drains ends."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    """Go forward."""
    op.add_column("services", sa.Column("notice_ends_at", sa.Float(precision=53), nullable=True))


def downgrade() -> None:
    """Go back."""
    op.drop_column("services", "notice_ends_at")
