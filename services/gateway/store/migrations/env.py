"""Alembic's entry point: it runs the migrations on the connection that ``migrate.upgrade`` hands over."""

from alembic import context

from flotilla.services.gateway.store import tables

context.configure(connection=context.config.attributes["connection"], target_metadata=tables.metadata)
with context.begin_transaction():
    context.run_migrations()
