"""Remember whose shift it is on shared devices."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Go forward."""
    op.add_column("experiments", sa.Column("device_shift", sa.Integer(), nullable=False, server_default="1"))
