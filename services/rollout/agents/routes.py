"""How the gateway reaches the episodes of a rollout: requests of agents, passed on with the fleet's token.

Bodies are bounded by the gateway, and again here. Errors are problem documents that clients of a model can read, too.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse

from flotilla.services.rollout.agents.episode import Asked, Endpoint, Episode
from flotilla.services.rollout.agents.episodes import AgentEpisodes
from flotilla.services.rollout.agents.messages import PING
from flotilla.services.rollout.agents.replies import Reply
from flotilla.shared.errors import FlotillaError, InvalidRequest, NotFound, Unauthorized, Unavailable
from flotilla.shared.net.authorisation.tokens import Accepts
from flotilla.shared.net.server.model_api_problems import anthropic_problem, openai_problem
from flotilla.shared.schemas.episode import (
    BeginEpisode,
    CompleteEpisode,
    EndedEpisode,
    EpisodeReward,
    EpisodesGivenBack,
    GiveBackEpisodes,
    OpenedEpisode,
)

MAX_BODY_BYTES: Final = 16 * 1024 * 1024
ALIVE_SECONDS: Final = 5.0
ALIVE: Final = b": the policy is writing\n\n"
RETRIES: Final = "x-stainless-retry-count"
"""Header in which OpenAI's and Anthropic's clients mark a retry."""

STREAMED: Final[dict[str, Any]] = {"content": {"application/json": {}, "text/event-stream": {}}}


def episodes_router(find: Callable[[Request, str], AgentEpisodes | None], accepts: Accepts) -> APIRouter:
    """Make the routes.

    Args:
        find: finds the episodes of an experiment in what the app's lifespan opened; None if it is not worked for here.
        accepts: checks an ``Authorization`` header.
    """

    async def is_let_in(request: Request) -> None:
        if not accepts(request.headers.get("authorization")):
            raise Unauthorized("a token of the fleet is needed: agents talk to the gateway")

    router = APIRouter(
        prefix="/v1/experiments/{experiment_id}/episodes", tags=["episodes"], dependencies=[Depends(is_let_in)]
    )

    def found(request: Request, experiment_id: str) -> AgentEpisodes:
        episodes = find(request, experiment_id)
        if episodes is None:
            raise NotFound(f"no agents work for experiment {experiment_id} here")
        return episodes

    @router.post("", status_code=201)
    async def begin(experiment_id: str, wanted: BeginEpisode, request: Request) -> OpenedEpisode:
        """Hand out an episode."""
        return await _opened(found(request, experiment_id), wanted, request)

    @router.post("/give-back")
    async def give_back(experiment_id: str, given: GiveBackEpisodes, request: Request) -> EpisodesGivenBack:
        """Hand out again what an agent holds that has ended."""
        return EpisodesGivenBack(episode_ids=tuple(await found(request, experiment_id).give_back(given.holder)))

    @router.post("/{episode_id}/complete")
    async def complete(experiment_id: str, episode_id: str, ending: CompleteEpisode, request: Request) -> EndedEpisode:
        """End an episode.

        Raises:
            EpisodeGone: the episode has ended.
        """
        reward = None if ending.reward is None else EpisodeReward(reward=ending.reward, metrics=ending.metrics)
        return await found(request, experiment_id).complete(episode_id, reward)

    @router.post("/{episode_id}/{what}", responses={200: STREAMED})
    async def ask(experiment_id: str, episode_id: str, what: str, request: Request) -> Response:
        """Sample a reply: ``chat``, ``text``, ``responses`` or ``messages``; or ``count_tokens`` of the last.

        Raises:
            EpisodeGone: the episode has ended.
        """
        try:
            if what not in set(Endpoint):
                raise NotFound(f"an episode has no {what}")
            return await _asked(found(request, experiment_id), episode_id, Endpoint(what), request)
        except FlotillaError as error:
            return _problem(what, error)

    return router


async def _asked(episodes: AgentEpisodes, episode_id: str, endpoint: Endpoint, request: Request) -> Response:
    episode = episodes.find(episode_id)
    is_repeated = request.headers.get(RETRIES, "0") != "0"
    asked = Asked(endpoint, await _body(request), is_repeated)
    may_stream = b'"stream"' in asked.body and endpoint is not Endpoint.COUNT_TOKENS
    if may_stream and await episodes.threads.run(lambda: _is_streamed(asked.body)):
        return StreamingResponse(_stream(episode, asked, request), media_type="text/event-stream")
    reply = await episode.answer(asked, request.is_disconnected)
    return Response(reply.to_json() if reply is not None else b"", media_type="application/json")


async def _opened(episodes: AgentEpisodes, wanted: BeginEpisode, request: Request) -> OpenedEpisode:
    """Begin an episode, unless the caller has gone before there is one."""
    opening = asyncio.ensure_future(
        episodes.open(wanted.wait_seconds, wanted.key, only_known=wanted.only_known, holder=wanted.holder)
    )
    hanging_up = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait([opening, hanging_up], return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            return opening.result()
        raise Unavailable("the caller has gone")
    finally:
        for task in (opening, hanging_up):
            task.cancel()
        await asyncio.gather(opening, hanging_up, return_exceptions=True)


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _problem(what: str, error: FlotillaError) -> Response:
    is_anthropic = what in set(Endpoint) and Endpoint(what).is_anthropic
    return anthropic_problem(error) if is_anthropic else openai_problem(error)


async def _body(request: Request) -> bytes:
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > MAX_BODY_BYTES:
            raise InvalidRequest(f"the body must not be larger than {MAX_BODY_BYTES} bytes")
    return bytes(content)


def _is_streamed(body: bytes) -> bool:
    try:
        return bool(json.loads(body).get("stream"))
    except (ValueError, AttributeError, RecursionError):
        return False


async def _stream(episode: Episode, asked: Asked, request: Request) -> AsyncIterator[bytes]:
    """Send comments while the reply is sampled, so that the silence is not taken for a broken connection."""
    is_anthropic = asked.endpoint.is_anthropic
    answering = asyncio.ensure_future(episode.answer(asked, request.is_disconnected))
    try:
        while not answering.done():
            await asyncio.wait([answering], timeout=ALIVE_SECONDS)
            if not answering.done():
                yield PING if is_anthropic else ALIVE
        reply: Reply | None = answering.result()
    except FlotillaError as error:
        content = {"error": json.loads(bytes(_problem(asked.endpoint, error).body))["error"]}
        if is_anthropic:
            yield b"event: error\n"
            content["type"] = "error"
        yield b"data: " + json.dumps(content).encode() + b"\n\n"
        return
    finally:
        answering.cancel()
    for event in reply.to_stream() if reply is not None else ():
        yield event
