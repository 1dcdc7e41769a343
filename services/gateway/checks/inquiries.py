"""What services are asked on behalf of people: what they logged, and what they reach."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from flotilla.services.gateway.checks.examination import Examinations
from flotilla.services.gateway.membership.joining import Returning
from flotilla.services.gateway.membership.service_logs import ServiceLogs
from flotilla.services.gateway.registry.services import Registry
from flotilla.shared.clock import Clock


class Inquiries:
    """Made once for a gateway.

    Args:
        registry: of the services.
        returning: of removed services.
        log_token: makes what a service lets in to read its logs, by its id.
        data: the gateway's data directory.
        clock: tells the time.
    """

    def __init__(
        self, registry: Registry, returning: Returning, log_token: Callable[[str], str], data: Path, clock: Clock
    ) -> None:
        self.logs: Final = ServiceLogs(registry, log_token)
        self.examinations: Final = Examinations(registry, returning, data, clock)
