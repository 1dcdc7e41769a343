"""Remember whose tokens and experiments are; those that are there are the fleet's own."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    """Go forward."""
    op.add_column("experiments", sa.Column("owner", sa.String(48), nullable=True))
    op.add_column("tokens", sa.Column("owner", sa.String(48), nullable=True))
