"""Keep measurements that have not ended, so that a gateway that dies takes no step's series with it."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Go forward."""
    op.create_table(
        "windows",
        sa.Column("experiment_id", sa.String(length=96), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("data", sa.JSON(none_as_null=True), nullable=False),
        sa.PrimaryKeyConstraint("experiment_id", "name"),
    )
