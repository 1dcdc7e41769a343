"""Traces: one follows a group through feeder, rollout, reward, trainer and publication."""
