"""The training worker as several ranks: one process starts them, ends them together, and reports the one that ended."""
