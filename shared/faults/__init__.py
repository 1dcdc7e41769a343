"""Faults on purpose, for tests: a plan in ``FLOTILLA_FAULTS`` says which, and named sites in the code make them."""
