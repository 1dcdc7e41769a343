"""Episodes for an agent that is Python code: asked for, played, and ended with a reward, several at a time."""

import asyncio
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import httpx

from flotilla.agents import holders
from flotilla.shared.environment.settings import gateway_urls
from flotilla.shared.errors import InvalidSpec, NotLeading
from flotilla.shared.net.client.bearer_client import tls_context
from flotilla.shared.schemas.episode import MAX_METRICS, MAX_NAME, GiveBackEpisodes, OpenEpisode

log = logging.getLogger(__name__)

NO_MORE = frozenset({401, 403, 404, 409})
"""Statuses that no patience changes: the experiment has ended, or the token is for it no longer."""
LATER = frozenset({408, 425, 429})
"""Of those below 500, statuses that are no refusal of what was asked."""
AWAY = frozenset({0, 502, 503, 504})
"""Statuses of a gateway that is not there, or of one that does not lead."""
COMPLETE_SECONDS = 60.0
GIVE_BACK_SECONDS = 2.0
"""Less than what is waited for an agent that is ended."""
WAIT_SECONDS = 20.0
PAUSE_SECONDS = 1.0
REQUEST_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode as the gateway hands it out; ``task`` is the row."""

    id: str
    key: str
    base_url: str
    model: str
    task: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an episode was worth; metrics, the first 32 of them, are shown and enter no reward."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class EpisodeLost(Exception):
    """The fleet has ended the episode, or refuses the agent's request: another agent gets the task."""


Play = Callable[[Episode], Awaitable[Verdict]]
"""Plays one episode.

Raises:
    EpisodeLost: it cannot continue.
"""


async def play_all(gateway: str, experiment: str, token: str, play: Play, *, parallel: int) -> int:
    """Play episodes until the experiment has ended; return how many were complete.

    What ``play`` raises besides ``EpisodeLost`` ends all: it is the agent's own error.

    Args:
        gateway: its URL, or those of several with commas between them, of which the one that leads is asked.

    Raises:
        ExceptionGroup: of that, or of ``InvalidSpec``: the experiment is none for agents.
    """
    limits = httpx.Limits(max_connections=parallel)
    async with httpx.AsyncClient(timeout=REQUEST_SECONDS, limits=limits, verify=tls_context()) as client:
        gateways = Gateways(gateway, client)
        async with _holding(gateways, experiment, token) as holder, asyncio.TaskGroup() as group:
            playing = [_play(gateways, experiment, token, play, holder) for _ in range(parallel)]
            tasks = [group.create_task(each) for each in playing]
        return sum(task.result() for task in tasks)


@asynccontextmanager
async def _holding(gateways: "Gateways", experiment: str, token: str) -> AsyncIterator[str | None]:
    """Have a name as a holder, and give back what it holds at the end; first what those hold who had no end of theirs.

    None where there is no place for such names: episodes are given up with their leases there.
    """

    async def give_back(name: str) -> bool:
        path = f"/v1/experiments/{experiment}/episodes/give-back"
        with suppress(TimeoutError):
            async with asyncio.timeout(GIVE_BACK_SECONDS):
                status, _ = await gateways.post(path, token, GiveBackEpisodes(holder=name).model_dump())
                return status == 200 or status in NO_MORE
        return False

    with ExitStack() as stack:
        try:
            folder = holders.folder_of(experiment)
            holder = stack.enter_context(holders.held(folder))
        except OSError as error:
            log.warning("episodes of agents that die wait for their leases", extra={"error": str(error)})
            yield None
            return
        with holders.left_by_ended(folder) as ended:
            for name in list(ended):
                if await give_back(name):
                    ended.remove(name)
        try:
            yield holder
        finally:
            await give_back(holder)


async def _play(gateways: "Gateways", experiment: str, token: str, play: Play, holder: str | None = None) -> int:
    done, is_known = 0, False
    wanted = OpenEpisode(wait_seconds=WAIT_SECONDS, holder=holder).model_dump(exclude_none=True)
    while True:
        status, found = await gateways.post(f"/v1/experiments/{experiment}/episodes", token, wanted)
        if status in NO_MORE:
            # Where it never was otherwise, the experiment or the token may be a wrong one.
            facts = {"status": status, "detail": _why(found)}
            log.log(logging.INFO if is_known else logging.WARNING, "no more episodes", extra=facts)
            return done
        if 400 <= status < 500 and status not in LATER:
            raise InvalidSpec(f"the gateway hands out no episodes of {experiment} ({status}): {_why(found)}")
        is_known = is_known or status != 0
        if status != 201:
            await asyncio.sleep(PAUSE_SECONDS)
            continue
        episode = Episode(found["episode_id"], found["key"], found["base_url"], found["model"], found["task"])
        try:
            verdict = await _within(play(episode), float(found["seconds"]))
        except EpisodeLost as error:
            log.warning("episode abandoned", extra={"episode": episode.id, "error": str(error)})
            continue
        if not math.isfinite(verdict.reward):
            log.warning("episode abandoned", extra={"episode": episode.id, "error": f"its reward is {verdict.reward}"})
            continue
        status, found = await _complete(gateways, episode, verdict)
        if status != 200:
            facts = {"episode": episode.id, "status": status, "detail": _why(found)}
            log.warning("the episode's reward was not taken", extra=facts)
        done += status == 200


async def _within(playing: Awaitable[Verdict], seconds: float) -> Verdict:
    """Play an episode for as long as it may last: one that never ends would hold its place for ever.

    Raises:
        EpisodeLost: it lasted longer.
    """
    bound = asyncio.timeout(seconds)
    try:
        async with bound:
            return await playing
    except TimeoutError as error:
        if not bound.expired():
            raise
        raise EpisodeLost(f"it was not over within its {seconds:g} s") from error


async def _complete(gateways: "Gateways", episode: Episode, verdict: Verdict) -> "Answer":
    """End an episode with its reward; a gateway that is away for a moment does not cost the work of an hour."""
    told = {name[:MAX_NAME]: value for name, value in verdict.metrics.items() if math.isfinite(value)}
    body = {"reward": verdict.reward, "metrics": dict(islice(told.items(), MAX_METRICS))}
    key, end = uuid.uuid4().hex, time.monotonic() + COMPLETE_SECONDS
    while True:
        answer = await gateways.post(f"/v1/episodes/{episode.id}/complete", episode.key, body, key)
        if answer[0] not in AWAY or time.monotonic() > end:
            return answer
        await asyncio.sleep(PAUSE_SECONDS)


Answer = tuple[int, dict[str, Any]]
"""Status and document."""


def _why(found: Mapping[str, Any]) -> Any:
    """Take from an answer why it is a refusal."""
    return found.get("detail")


class Gateways:
    """Posts to the gateway that leads, and to the next one where it does not answer."""

    def __init__(self, urls: str, client: httpx.AsyncClient) -> None:
        self._urls = gateway_urls(urls)
        self._client = client
        self._at = 0

    async def post(self, path: str, token: str, body: Mapping[str, Any], key: str | None = None) -> Answer:
        """Post JSON; return status and answer, status 0 where no gateway gives one.

        A gateway that gives no answer may have done what was asked: the next one knows by the call's idempotency key,
        which is a new one where none is given.
        """
        answer: Answer = (0, {})
        headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": key or uuid.uuid4().hex}
        for _ in self._urls:
            asked = self._at
            answer = await self._post(f"{self._urls[asked]}{path}", headers, body)
            if answer[0] != 0 and answer[1].get("code") != NotLeading.code:
                return answer
            # Another episode may have turned from it already.
            if asked == self._at:
                self._at = (asked + 1) % len(self._urls)
        return answer

    async def _post(self, url: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> Answer:
        try:
            answer = await self._client.post(url, json=body, headers=headers)
            found = answer.json() if answer.content else {}
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            return 0, {"detail": str(error)}
        return answer.status_code, found if isinstance(found, dict) else {}
