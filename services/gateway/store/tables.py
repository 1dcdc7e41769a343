"""The tables, as SQLAlchemy sees them. ``migrations/`` makes them; a test compares the two."""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData()

# SQLite grows only an INTEGER primary key by itself.
Sequence = BigInteger().with_variant(Integer(), "sqlite")
Document = JSON(none_as_null=True)

experiments = Table(
    "experiments",
    metadata,
    Column("id", String(96), primary_key=True),
    Column("name", String(96), nullable=False),
    Column("state", String(16), nullable=False),
    Column("revision", Integer, nullable=False),
    Column("spec", Document, nullable=False),
    Column("directory", Text, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("updated_at", Float(53), nullable=False),
    Column("started_at", Float(53)),
    Column("step", Integer, nullable=False),
    Column("policy_version", Integer, nullable=False),
    Column("published_step", Integer, nullable=False),
    Column("trainer_epoch", Integer, nullable=False),
    Column("outcome", String(16)),
    Column("is_trained", Boolean, nullable=False),
    Column("evaluated_version", Integer),
    Column("evaluating_version", Integer),
    Column("problem", Document),
    Column("final_ledger", Document),
    Column("origin", Document),
    Column("health", Document),
    Column("number", Integer, nullable=False, server_default="0"),
    Column("start_number", Integer, nullable=False, server_default="0"),
    Column("device_shift", Integer, nullable=False, server_default="1"),
    Column("spec_revision", Integer, nullable=False, server_default="0"),
    Column("created_by", String(64)),
    Column("owner", String(48)),
    Column("changes", Document),
)

services = Table(
    "services",
    metadata,
    Column("id", String(96), primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("address", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("capabilities", Document, nullable=False),
    Column("incarnation", Text, nullable=False),
    Column("registered_at", Float(53), nullable=False),
    Column("is_draining", Boolean, nullable=False),
    Column("notice_ends_at", Float(53)),
    Column("experiment_id", String(96)),
    Column("number", Integer, nullable=False, server_default="0"),
    Column("silent_since", Float(53)),
    Column("trainer_epoch", Integer),
)

publications = Table(
    "publications",
    metadata,
    Column("experiment_id", String(96), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("step", Integer, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("phase", String(16), nullable=False),
    Column("service_id", String(96), nullable=False),
    Column("manifest", Document, nullable=False),
    Column("members", Document, nullable=False),
    Column("rendezvous", Document),
    Column("reason", Text),
    Column("announced_at", Float(53), nullable=False),
    Column("ended_at", Float(53)),
)

metrics = Table(
    "metrics",
    metadata,
    Column("sequence", Sequence, primary_key=True, autoincrement=True),
    Column("experiment_id", String(96), nullable=False),
    Column("name", Text, nullable=False),
    Column("step", Integer, nullable=False),
    Column("version", Integer, nullable=False),
    Column("value", Float(53), nullable=False),
    Column("at", String(32)),
    # A step's values are written together, and lie together in this order.
    UniqueConstraint("experiment_id", "step", "name", name="one_value_per_step"),
    Index("metrics_in_order", "experiment_id", "sequence"),
    sqlite_autoincrement=True,
)

events = Table(
    "events",
    metadata,
    Column("id", Sequence, primary_key=True, autoincrement=True),
    Column("experiment_id", String(96), nullable=False),
    Column("type", String(64), nullable=False),
    Column("at", Float(53), nullable=False),
    Column("data", Document, nullable=False),
    Index("events_in_order", "experiment_id", "id"),
    sqlite_autoincrement=True,
)

audit = Table(
    "audit",
    metadata,
    Column("id", Sequence, primary_key=True, autoincrement=True),
    Column("at", Float(53), nullable=False),
    Column("action", String(64), nullable=False),
    Column("resource", String(128), nullable=False),
    Column("detail", Document, nullable=False),
    Column("actor", String(64), nullable=False),
    Index("audit_by_resource", "resource", "id"),
    sqlite_autoincrement=True,
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("experiment_id", String(96), primary_key=True),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("version", Integer, nullable=False),
    Column("path", Text, nullable=False),
    Column("at", Text, nullable=False),
)

last_transaction = Table(
    "last_transaction",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("name", String(16), nullable=False),
    Column("term", Integer, nullable=False, server_default="0"),
    Column("leader", Text),
)

windows = Table(
    "windows",
    metadata,
    Column("experiment_id", String(96), primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("data", Document, nullable=False),
)

webhook_deliveries = Table(
    "webhook_deliveries",
    metadata,
    Column("id", Sequence, primary_key=True, autoincrement=True),
    Column("message_id", String(64), nullable=False, unique=True),
    Column("experiment_id", String(96), nullable=False),
    Column("hook", String(64), nullable=False),
    Column("type", String(64), nullable=False),
    Column("at", Float(53), nullable=False),
    Column("body", Text, nullable=False),
    sqlite_autoincrement=True,
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("name", String(48), nullable=False, unique=True),
    Column("scope", String(16), nullable=False),
    Column("kind", String(16)),
    Column("experiment_id", String(96)),
    Column("subject", String(128)),
    Column("digest", String(64), nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("expires_at", Float(53)),
    Column("created_by", String(64), nullable=False),
    Column("quota", Document),
    Column("owner", String(48)),
)

idempotency = Table(
    "idempotency",
    metadata,
    Column("key", String(400), primary_key=True),
    Column("body_digest", String(64), nullable=False),
    Column("status", Integer, nullable=False),
    Column("content_type", String(128), nullable=False),
    Column("body", Text, nullable=False),
    Column("at", Float(53), nullable=False),
    Index("idempotency_by_age", "at"),
)
