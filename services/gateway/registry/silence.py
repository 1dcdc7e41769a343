"""How silences of hosts are told: by the address that others reach them at, and in few steps of time."""

from urllib.parse import urlsplit

from flotilla.services.gateway.store.records import ServiceRecord

TOLD_SECONDS = (1, 2, 5, 10, 15, 20, 30, 45, 60, 120, 300)
"""Silences that are told apart: each new one changes what is stored of an experiment."""


def no_contact(record: ServiceRecord, seconds: float) -> str:
    """Say that a service's host is silent, such as ``no contact with 10.0.0.3 (rollout-1a2b3c4d) for 10 s``."""
    return f"no contact with {host_of(record)} for {told(seconds)} s"


def told(seconds: float) -> int:
    """Round a silence down to one that is told."""
    return max((each for each in TOLD_SECONDS if each <= seconds), default=0)


def host_of(record: ServiceRecord) -> str:
    """Name a service's host, and the service: ``10.0.0.3 (rollout-1a2b3c4d)``."""
    return f"{urlsplit(record.address).hostname or record.host} ({record.id})"
