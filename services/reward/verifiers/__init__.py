"""Verifiers: each turns answers into grades, and never a failure into a reward."""
