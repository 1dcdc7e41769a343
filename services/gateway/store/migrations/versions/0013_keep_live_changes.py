"""Keep what was changed of a spec while its experiment ran."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    """Go forward."""
    op.add_column("experiments", sa.Column("changes", sa.JSON(none_as_null=True), nullable=True))
