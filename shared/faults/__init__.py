"""Faults on purpose, for tests: a plan in ``FLOTILLA_FAULTS`` lists them, and named sites in the code inject them."""
