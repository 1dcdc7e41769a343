"""Remember who was given up for its silence, and who leads: a gateway that starts next knows both."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Go forward."""
    op.add_column("services", sa.Column("silent_since", sa.Float(53), nullable=True))
    op.add_column("services", sa.Column("trainer_epoch", sa.Integer(), nullable=True))
    op.add_column("last_transaction", sa.Column("term", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("last_transaction", sa.Column("leader", sa.Text(), nullable=True))
