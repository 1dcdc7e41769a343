"""Remember under which revision of the schema a spec was written; 0 for all of before."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Go forward."""
    op.add_column("experiments", sa.Column("spec_revision", sa.Integer(), nullable=False, server_default="0"))
