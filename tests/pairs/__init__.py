"""Every two options that touch the same state meet in a test: the table, the rows made of it, and what runs them."""
