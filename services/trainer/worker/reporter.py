"""Sends metrics and checkpoints to the gateway, in order, however long it is unavailable; training never waits for it.

What is not sent yet is in a file, too, and the figures of a step are there before a checkpoint contains it: a worker
that is killed would else leave steps without figures that are not trained again.
"""

import asyncio
import contextlib
import logging
import os
from collections import deque
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flotilla.shared.errors import FlotillaError, NotAssigned
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.net.retry import GATEWAY, retry
from flotilla.shared.schemas.experiment import CheckpointView, MetricBatch

log = logging.getLogger(__name__)

MAX_WAITING = 2048
CALL_SECONDS = 10.0


class Reporter:
    """A bounded queue of reports.

    Args:
        gateway: takes the reports.
        experiment_id: whose they are.
        unsent: the file that holds the metrics that are not sent yet, one batch per line.

    Attributes:
        num_lost: reports that were dropped because too many waited.
        is_replaced: another trainer, or this one in a later epoch, reports from now on, beginning with the file.
    """

    def __init__(self, gateway: GatewayClient, experiment_id: str, unsent: Path) -> None:
        self._gateway = gateway
        self._path = f"/v1/experiments/{experiment_id}"
        self._waiting: deque[tuple[str, Any]] = deque()
        self._changed = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.num_lost = 0
        self.is_replaced = False
        self._unsent = unsent
        self._has_kept = False

    def keep(self, batch: MetricBatch) -> None:
        """Keep what is known of a step before a checkpoint contains it; ``metrics`` reports it, or the next worker."""
        self._write(batch)
        self._has_kept = True

    def metrics(self, batch: MetricBatch) -> None:
        """Report the figures of a step."""
        self._write(batch)
        self._has_kept = False
        self._add("metrics", batch)

    def sync(self) -> None:
        """Let what is not sent outlive a power cut; blocks."""
        with contextlib.suppress(OSError), self._unsent.open("rb") as file:
            os.fsync(file.fileno())

    def _write(self, batch: MetricBatch) -> None:
        try:
            with self._unsent.open("a", encoding="utf-8") as file:
                # A line of its own, whatever the line before was cut off at.
                file.write(f"\n{batch.model_dump_json()}\n")
        except OSError as error:
            log.warning("unsent metrics cannot be kept in a file", extra={"error": repr(error)})

    def resend(self, step: int) -> None:
        """Report again what a worker before this one could not send, up to a step: later ones are trained again."""
        text = self._unsent.read_text(encoding="utf-8", errors="replace") if self._unsent.exists() else ""
        found: dict[int, MetricBatch] = {}
        for line in text.split("\n"):
            try:
                batch = MetricBatch.model_validate_json(line)
            except ValidationError:
                continue  # empty, or its writer was killed within the line
            if batch.step <= step:
                # A step's last line is the most complete, and that of the lineage which the checkpoint is of.
                found[batch.step] = batch
        for each in sorted(found):
            self._add("metrics", found[each])

    def checkpoint(self, view: CheckpointView) -> None:
        """Report a durable checkpoint."""
        self._add("checkpoints", view)

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            while self._waiting:
                kind, body = self._waiting[0]
                if not self.is_replaced:
                    await self._send(kind, body)
                self._waiting.popleft()
            if not self._has_kept and not self.is_replaced:
                self._unsent.unlink(missing_ok=True)
            self._is_empty.set()
            self._changed.clear()
            await self._changed.wait()

    async def flush(self, wait_seconds: float) -> bool:
        """Wait until everything is sent; False if that was not so in time."""
        try:
            async with asyncio.timeout(wait_seconds):
                await self._is_empty.wait()
        except TimeoutError:
            return False
        return True

    def _add(self, kind: str, body: Any) -> None:
        if len(self._waiting) >= MAX_WAITING:
            # The one at the head is being sent; what follows it is the oldest that may go.
            del self._waiting[1]
            self.num_lost += 1
            log.warning("a report was lost, too many wait for the gateway", extra={"lost": self.num_lost})
        self._waiting.append((kind, body))
        self._is_empty.clear()
        self._changed.set()

    async def _send(self, kind: str, body: Any) -> None:
        async def call() -> None:
            await self._gateway.call("POST", f"{self._path}/{kind}", body=body, deadline_seconds=CALL_SECONDS)

        try:
            await retry(call, waiting_for=GATEWAY)
        except NotAssigned as error:
            self.is_replaced = True
            log.warning("reports are left to the next trainer", extra={"kind": kind, "error": error.detail})
        except FlotillaError as error:
            log.warning("the gateway refused a report", extra={"kind": kind, "error": error.detail})
