"""Number experiments and services in the order in which they came, so that a clock that is set back changes nothing."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Go forward."""
    for table, name in (("experiments", "number"), ("experiments", "start_number"), ("services", "number")):
        op.add_column(table, sa.Column(name, sa.Integer(), nullable=False, server_default="0"))
