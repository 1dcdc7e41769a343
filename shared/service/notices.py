"""Polls a cloud's metadata for a preemption notice, and has the service leave in time.

AWS: instance metadata of version 2, ``spot/instance-action``, two minutes ahead. GCP: ``instance/preempted``, 30 s.
Azure: scheduled events ``Preempt`` and ``Terminate`` of this machine, 30 s and more. Nothing but these is read, no
proxy is asked, and no answer is followed elsewhere.
"""

import logging
import os
import ssl
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

from flotilla.shared.net.server.serving import NOTICE
from flotilla.shared.schemas.service import Cloud, NoticeSource

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
ASK_SECONDS = 2.0
"""For one question: the answer comes from the machine's own host."""
SHORTEST_NOTICE_SECONDS = 30.0
"""The shortest notice of any cloud; for notices without a time."""
END_SECONDS = 5.0
"""Kept of a notice for what comes after the hand-over: the process ends."""
MOST_BYTES = 256 * 1024
TOKEN_SECONDS = 21_600
"""The longest that AWS gives."""
AWS_HEADER = "X-aws-ec2-metadata-token"
TAKEN_AWAY = frozenset({"Preempt", "Terminate"})


class _NoAnswer(Exception):  # never leaves this module: a machine may be slow to answer, or have no metadata
    """The metadata did not answer as documented."""


class Metadata:
    """One cloud's notice for this machine.

    Args:
        source: whom to ask.
        now: seconds since the epoch.
    """

    def __init__(self, source: NoticeSource, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._ask = {Cloud.AWS: self._aws, Cloud.GCP: self._gcp, Cloud.AZURE: self._azure}[source.cloud]
        # The address is the machine's own; a proxy would answer for another one.
        self._client = httpx.Client(
            base_url=source.url,
            timeout=ASK_SECONDS,
            trust_env=False,
            follow_redirects=False,
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),  # it speaks no TLS; reading all authorities takes seconds
        )
        self._token: str | None = None
        self._name: str | None = None

    def seconds_left(self) -> float | None:
        """Ask how long this machine has, in seconds; None while it may stay.

        Raises:
            OSError: the metadata do not answer, or not as documented.
        """
        try:
            return self._ask()
        except (httpx.HTTPError, ValueError, TypeError, KeyError, AttributeError, _NoAnswer) as error:
            raise OSError(f"{type(error).__name__}: {error}") from None

    def close(self) -> None:
        """Close its connection."""
        self._client.close()

    def _until(self, at: datetime) -> float:
        return max(0.0, (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - self._now())

    def _get(self, path: str, headers: dict[str, str], *allowed: int) -> httpx.Response:
        answer = self._client.get(path, headers=headers)
        if answer.status_code not in {200, *allowed}:
            raise _NoAnswer(f"{path} answered {answer.status_code}")
        if len(answer.content) > MOST_BYTES:
            raise _NoAnswer(f"{path} answered {len(answer.content)} bytes")
        return answer

    def _aws(self) -> float | None:
        if self._token is None:
            lifetime = {f"{AWS_HEADER}-ttl-seconds": str(TOKEN_SECONDS)}
            made = self._client.put("/latest/api/token", headers=lifetime)
            if made.status_code != 200:
                raise _NoAnswer(f"/latest/api/token answered {made.status_code}")
            self._token = made.text
        answer = self._get("/latest/meta-data/spot/instance-action", {AWS_HEADER: self._token}, 401, 404)
        if answer.status_code == 401:
            self._token = None  # it has ended: the next look makes another
            return None
        if answer.status_code == 404:
            return None
        return self._until(datetime.fromisoformat(answer.json()["time"]))

    def _gcp(self) -> float | None:
        answer = self._get("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
        return SHORTEST_NOTICE_SECONDS if answer.text.strip() == "TRUE" else None

    def _azure(self) -> float | None:
        asked = {"Metadata": "true"}
        if self._name is None:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._name = self._get(path, asked).text.strip()
        events = self._get("/metadata/scheduledevents?api-version=2020-07-01", asked).json()["Events"]
        # Machines of one set hear of each other's events.
        mine = [each for each in events if each["EventType"] in TAKEN_AWAY and self._name in each["Resources"]]
        ends = [
            self._until(parsedate_to_datetime(each["NotBefore"])) if each.get("NotBefore") else 0.0 for each in mine
        ]
        return min(ends, default=None)


def watch_notices(source: NoticeSource, on_notice: Callable[[float], None]) -> Callable[[], None]:
    """Poll now and every two seconds, in a thread; while there is a notice, call with the remaining time.

    Returns:
        What ends the watch.
    """
    ended = threading.Event()

    def wait() -> None:
        metadata, is_told, is_away = Metadata(source), False, False
        try:
            while True:
                try:
                    left = metadata.seconds_left()
                    is_away = False
                except OSError as error:
                    left = None
                    if not is_away:
                        log.warning("notices cannot be read", extra={"url": source.url, "error": str(error)})
                    is_away = True
                if left is not None and not ended.is_set():
                    if not is_told:
                        log.warning("this machine will be preempted", extra={"seconds": round(left, 1)})
                    is_told = True
                    on_notice(left)
                if ended.wait(LOOK_SECONDS):
                    return
        finally:
            metadata.close()

    threading.Thread(target=wait, name="notices", daemon=True).start()
    return ended.set


class Departure:
    """How long this service may take to leave: as it was set, and never longer than its machine is there.

    Args:
        notice_seconds: after a SIGTERM.
    """

    def __init__(self, notice_seconds: float) -> None:
        self._notice_seconds = notice_seconds
        self._ends_at: float | None = None
        self._is_new = self._has_begun = False

    def hear(self, seconds_left: float) -> None:
        """Have the service leave by a notice, with all of its time but what the process takes to end.

        Heard again, it holds again what the first one said, for a service that did not exist yet; once the
        departure has begun nothing.
        """
        if self._has_begun:
            return
        ends_at = time.monotonic() + max(0.0, seconds_left - END_SECONDS)
        self._ends_at = ends_at if self._ends_at is None else min(self._ends_at, ends_at)
        self._is_new = True
        os.kill(os.getpid(), NOTICE)

    def begin(self) -> float:
        """Return how long the departure that begins now may take, in seconds."""
        self._has_begun = True
        left = None if self._ends_at is None else max(0.0, self._ends_at - time.monotonic())
        is_told, self._is_new = self._is_new, False
        if left is None:
            return self._notice_seconds
        return left if is_told else min(left, self._notice_seconds)
