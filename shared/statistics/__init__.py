"""Statistics that more than one service takes."""
