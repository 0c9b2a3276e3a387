"""Run by alembic: migrate over the connection that ``chatsvc.store.schema`` hands in, all or nothing."""

from alembic import context

context.configure(connection=context.config.attributes["connection"], transaction_per_migration=False)
with context.begin_transaction():
    context.run_migrations()
