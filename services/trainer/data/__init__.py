"""From scored groups to micro-batches."""
