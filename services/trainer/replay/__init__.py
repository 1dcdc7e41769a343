"""A trained step computed again, from its samples and a checkpoint before it."""
