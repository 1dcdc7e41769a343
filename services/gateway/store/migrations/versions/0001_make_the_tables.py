"""Make the tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Go forward."""
    _make_records()
    _make_series()
    _make_fleet()


def _make_records() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("resource", sa.String(length=128), nullable=False),
        sa.Column("detail", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("actor", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index("audit_by_resource", "audit", ["resource", "id"], unique=False)
    op.create_table(
        "checkpoints",
        sa.Column("experiment_id", sa.String(length=96), nullable=False),
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("at", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("experiment_id", "step"),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("experiment_id", sa.String(length=96), nullable=False),
        sa.Column("type", sa.String(length=64), nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.Column("data", sa.JSON(none_as_null=True), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index("events_in_order", "events", ["experiment_id", "id"], unique=False)
    op.create_table(
        "experiments",
        sa.Column("id", sa.String(length=96), nullable=False),
        sa.Column("name", sa.String(length=96), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("spec", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("directory", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("updated_at", sa.Float(precision=53), nullable=False),
        sa.Column("started_at", sa.Float(precision=53), nullable=True),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("policy_version", sa.Integer(), nullable=False),
        sa.Column("published_step", sa.Integer(), nullable=False),
        sa.Column("trainer_epoch", sa.Integer(), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=True),
        sa.Column("is_trained", sa.Boolean(), nullable=False),
        sa.Column("evaluated_version", sa.Integer(), nullable=True),
        sa.Column("evaluating_version", sa.Integer(), nullable=True),
        sa.Column("problem", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("final_ledger", sa.JSON(none_as_null=True), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )


def _make_series() -> None:
    op.create_table(
        "idempotency",
        sa.Column("key", sa.String(length=400), nullable=False),
        sa.Column("body_digest", sa.String(length=64), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("content_type", sa.String(length=128), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("key"),
    )
    op.create_index("idempotency_by_age", "idempotency", ["at"], unique=False)
    op.create_table(
        "metrics",
        sa.Column("sequence", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("experiment_id", sa.String(length=96), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("value", sa.Float(precision=53), nullable=False),
        sa.Column("at", sa.String(length=32), nullable=True),
        sa.PrimaryKeyConstraint("sequence"),
        sa.UniqueConstraint("experiment_id", "name", "step", name="one_value_per_step"),
        sqlite_autoincrement=True,
    )
    op.create_index("metrics_in_order", "metrics", ["experiment_id", "sequence"], unique=False)


def _make_fleet() -> None:
    op.create_table(
        "publications",
        sa.Column("experiment_id", sa.String(length=96), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("phase", sa.String(length=16), nullable=False),
        sa.Column("service_id", sa.String(length=96), nullable=False),
        sa.Column("manifest", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("members", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("rendezvous", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("announced_at", sa.Float(precision=53), nullable=False),
        sa.Column("ended_at", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("experiment_id", "version"),
    )
    op.create_table(
        "services",
        sa.Column("id", sa.String(length=96), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("capabilities", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("incarnation", sa.Text(), nullable=False),
        sa.Column("registered_at", sa.Float(precision=53), nullable=False),
        sa.Column("is_draining", sa.Boolean(), nullable=False),
        sa.Column("experiment_id", sa.String(length=96), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
