"""Remember when the notice of a service that drains ends."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Go forward."""
    op.add_column("services", sa.Column("notice_ends_at", sa.Float(precision=53), nullable=True))
