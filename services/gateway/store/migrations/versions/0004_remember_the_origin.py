"""Remember the checkpoint of another experiment that an experiment began from."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Go forward."""
    op.add_column("experiments", sa.Column("origin", sa.JSON(none_as_null=True), nullable=True))
