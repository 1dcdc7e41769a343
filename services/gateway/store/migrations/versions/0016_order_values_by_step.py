"""Keep the values of a step next to each other in the index: by name each went to a page of its own."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"

ONE_VALUE = "one_value_per_step"
NEW_ORDER = ("experiment_id", "step", "name")
COPY = "metrics_by_step"
COLUMNS = "sequence, experiment_id, name, step, version, value, at"


def upgrade() -> None:
    """Go forward."""
    if op.get_bind().dialect.name == "sqlite":
        _make_again()
        return
    op.drop_constraint(ONE_VALUE, "metrics", type_="unique")
    op.create_unique_constraint(ONE_VALUE, "metrics", list(NEW_ORDER))


def _make_again() -> None:
    """SQLite changes no constraint of a table that is there. Cursors continue: no number is given out again."""
    # Of an upgrade that was cut short: the database takes such changes at once.
    op.execute(f"DROP TABLE IF EXISTS {COPY}")
    op.create_table(
        COPY,
        sa.Column("sequence", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("experiment_id", sa.String(length=96), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("value", sa.Float(precision=53), nullable=False),
        sa.Column("at", sa.String(length=32), nullable=True),
        sa.PrimaryKeyConstraint("sequence"),
        sa.UniqueConstraint(*NEW_ORDER, name=ONE_VALUE),
        sqlite_autoincrement=True,
    )
    op.execute(f"INSERT INTO {COPY} ({COLUMNS}) SELECT {COLUMNS} FROM metrics ORDER BY sequence")  # noqa: S608
    op.execute(f"DELETE FROM sqlite_sequence WHERE name = '{COPY}'")  # noqa: S608
    op.execute(
        f"INSERT INTO sqlite_sequence (name, seq) SELECT '{COPY}', seq FROM sqlite_sequence WHERE name = 'metrics'"  # noqa: S608
    )
    op.drop_table("metrics")
    op.rename_table(COPY, "metrics")
    op.create_index("metrics_in_order", "metrics", ["experiment_id", "sequence"])
