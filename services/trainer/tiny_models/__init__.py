"""Tiny random models of the architectures that specs name, to see whether an experiment runs."""
