"""The training worker as several ranks: one process that starts them, ends them together, and says which one ended."""
