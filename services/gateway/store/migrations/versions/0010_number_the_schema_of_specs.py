"""Remember under which revision of the schema a spec was written; 0 for all of before."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    """Go forward."""
    op.add_column("experiments", sa.Column("spec_revision", sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    """Go back."""
    op.drop_column("experiments", "spec_revision")
