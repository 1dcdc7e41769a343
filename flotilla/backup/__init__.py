"""Backups of a fleet while it works, and their return elsewhere.

The parts are taken one after the other: database, data plane, checkpoints. Each is of one moment, and of a later one
than the parts before it; what is true when they are put together again is what is true after any loss
(``shared/checkpoints/lineage.py``), so nothing here decides it a second time.
"""
