"""The data plane: tasks and groups travel Redis streams in fenced hops, counted by one ledger."""
