"""Agents from outside: episodes, and what clients of OpenAI and Anthropic call.

Requests for completions are passed on to the rollout of the episode byte by byte: an agent waits for each of them.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from flotilla.services.gateway.episodes.episodes import EpisodeName, models_of
from flotilla.services.gateway.episodes.rollouts import EpisodeGone
from flotilla.services.gateway.routes.dependencies import Gateway
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.concurrency.cancelling import cancelled_by
from flotilla.shared.errors import FlotillaError, InvalidRequest, Unavailable
from flotilla.shared.net.authorisation.access import Principal
from flotilla.shared.net.server.model_api_problems import anthropic_problem, openai_problem
from flotilla.shared.net.server.serving import PROBLEM_JSON
from flotilla.shared.schemas.episode import (
    CompleteEpisode,
    EndedEpisode,
    EpisodeReward,
    EpisodesGivenBack,
    GiveBackEpisodes,
    HandedOutEpisode,
    OpenEpisode,
)

router = APIRouter(tags=["agents"])

RETRIES: Final = b"x-stainless-retry-count"
LOOK_SECONDS: Final = 2.0
"""How often it is looked whether the rollout that is waited for is still there."""
Refusal = Callable[[FlotillaError], Response]
ANY_EPISODE = OpenEpisode()
NO_REWARD = CompleteEpisode()


def _principal(request: Request) -> Principal:
    principal: Principal = request.state.shown.principal
    return principal


@router.post("/experiments/{experiment_id}/episodes", status_code=201)
async def begin(
    experiment_id: str, gateway: Gateway, request: Request, wanted: OpenEpisode = ANY_EPISODE
) -> HandedOutEpisode:
    """Hand out a task, and the key and base URL with which an OpenAI client answers it.

    Raises:
        InvalidRequest: the spec has no ``rollout.agents``.
        ActionNotAllowed: the experiment has ended.
        NoTask: there is none now; ask again.
        QuotaExceeded: the token has as many open as it may.
    """
    base_url, key = str(request.base_url).rstrip("/"), request.headers.get("idempotency-key")
    # Nobody would work in what is begun for one who has gone.
    async with cancelled_by(lambda: _hung_up(request.receive), Unavailable("the caller has gone"), name="agent"):
        return await gateway.episodes.open(experiment_id, wanted, _principal(request), base_url, key)


@router.post("/experiments/{experiment_id}/episodes/give-back")
async def give_back(
    experiment_id: str, given: GiveBackEpisodes, gateway: Gateway, request: Request
) -> EpisodesGivenBack:
    """Hand out again at once what an agent holds that has ended; what it has started is refused from then on."""
    return await gateway.episodes.give_back(experiment_id, given.holder, _principal(request))


@router.get("/experiments/{experiment_id}/episodes")
async def counts(experiment_id: str, gateway: Gateway) -> dict[str, int]:
    """Count episodes: opened = open + completed + abandoned + lost; those that wait for an agent were not."""
    return gateway.episodes.counts(experiment_id)


@router.post("/episodes/{episode_id}/complete")
async def complete(
    episode_id: str, gateway: Gateway, request: Request, ending: CompleteEpisode = NO_REWARD
) -> EndedEpisode:
    """End an episode, with its reward or without.

    Raises:
        EpisodeGone: it ended otherwise.
        InvalidRequest: nothing was sampled in it, or no component takes the reward.
    """
    return await gateway.episodes.complete(gateway.episodes.allowed(episode_id, _principal(request)), ending)


@router.post("/episodes/{episode_id}/reward", status_code=204)
async def reward(episode_id: str, given: EpisodeReward, gateway: Gateway, request: Request) -> None:
    """Give a completed episode its reward, within the window of the spec.

    Raises:
        EpisodeGone: it is unknown, or no longer waited for.
        Conflict: it had another one.
    """
    await gateway.episodes.reward(gateway.episodes.allowed(episode_id, _principal(request)), given)


@router.get("/models")
async def models(gateway: Gateway, request: Request) -> Response:
    """List the model of the key's experiment, or those of all experiments for agents."""
    experiment_id = _principal(request).experiment_id
    known = gateway.repository if experiment_id is None else [gateway.repository.get(experiment_id)]
    found = [each.record for each in known if each.spec.rollout.agents is not None]
    return Response(models_of([(each.name, each.created_at) for each in found]), media_type="application/json")


@router.post("/chat/completions", response_class=Response)
async def chat(request: Request) -> Response:
    """Sample the reply to a chat, as OpenAI's endpoint of this name; the API key is the key of an episode.

    Raises:
        EpisodeGone: the episode has ended.
        InvalidRequest: what is asked for cannot be had, or a limit of the episode is reached (400, 422).
    """
    return PassedOn("chat", await request.body())


@router.post("/completions", response_class=Response)
async def text(request: Request) -> Response:
    """Sample the completion of a text or of token ids, as OpenAI's endpoint of this name."""
    return PassedOn("text", await request.body())


@router.post("/responses", response_class=Response)
async def responses(request: Request) -> Response:
    """Sample a response to items, as OpenAI's endpoint of this name; calls of functions are items of it."""
    return PassedOn("responses", await request.body())


@router.post("/messages", response_class=Response)
async def messages(request: Request) -> Response:
    """Sample the next message, as Anthropic's endpoint of this name; the key may come as ``x-api-key``, too."""
    return PassedOn("messages", await request.body(), anthropic_problem)


@router.post("/messages/count_tokens", response_class=Response)
async def count_tokens(request: Request) -> Response:
    """Count the tokens of a message's prompt, as Anthropic's endpoint of this name; nothing is sampled."""
    return PassedOn("count_tokens", await request.body(), anthropic_problem)


class PassedOn(Response):
    """The answer of the rollout that holds the key's episode.

    Args:
        what: is asked of it.
        content: of the request.
        refusal: makes the answer to a request that is not passed on.
    """

    def __init__(self, what: str, content: bytes, refusal: Refusal = openai_problem) -> None:
        super().__init__()
        self._what = what
        self._content = content
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on as it comes."""
        answer = _Answer(send, self._refusal)
        try:
            await _pass_on(scope, self._what, self._content, answer, receive)
        except FlotillaError as error:
            if answer.has_begun:
                # Too late for a status: the connection breaks, and the client knows that the answer is not whole.
                raise
            await answer.refuse(error)


class _Answer:
    """What is sent to the client."""

    def __init__(self, send: Send, refusal: Refusal) -> None:
        self._send = send
        self._refusal = refusal
        self.has_begun = False

    async def begin(self, status: int, content_type: bytes) -> None:
        self.has_begun = True
        headers = [(b"content-type", content_type), (b"x-accel-buffering", b"no")]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def go_on(self, piece: bytes, *, is_last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": not is_last})

    async def refuse(self, error: FlotillaError) -> None:
        """Send a problem document that the client reads as an error of its own."""
        await self.begin(error.status, PROBLEM_JSON.encode())
        await self.go_on(bytes(self._refusal(error).body), is_last=True)


async def _pass_on(scope: Scope, what: str, body: bytes, answer: _Answer, receive: Receive) -> None:
    gateway: GatewayState = scope["state"]["gateway"]
    rollouts = gateway.episodes.rollouts
    name = _episode_of(scope["state"]["shown"].principal)
    service = rollouts.find(name.service_id, name.text)
    path = f"/v1/experiments/{name.experiment_id}/episodes/{name.text}/{what}"
    retries = {RETRIES.decode(): value.decode() for key, value in scope["headers"] if key == RETRIES}

    async def pass_on() -> None:
        async with rollouts.streamed(service, path, body, retries) as streamed:
            await answer.begin(streamed.status, streamed.content_type)
            async for piece in streamed.pieces():
                await answer.go_on(piece)
        await answer.go_on(b"", is_last=True)

    passing, hanging_up = asyncio.ensure_future(pass_on()), asyncio.ensure_future(_hung_up(receive))
    try:
        while not passing.done() and not hanging_up.done():
            await asyncio.wait([passing, hanging_up], timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            # One that hangs ends with its lease; the episode's own deadlines end everything else.
            rollouts.find(name.service_id, name.text)
    finally:
        # The connection to the rollout is closed with it: so the rollout sees that the client is gone.
        for task in (passing, hanging_up):
            task.cancel()
        await asyncio.gather(passing, hanging_up, return_exceptions=True)
    if not passing.cancelled() and (error := passing.exception()) is not None:
        raise error


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _episode_of(who: Principal) -> EpisodeName:
    if who.subject is None:
        raise InvalidRequest("this token is of no episode: POST /v1/experiments/ID/episodes gives the key of one")
    name = EpisodeName.parse(who.subject)
    if name.experiment_id != who.experiment_id:
        raise EpisodeGone("this key is of no episode")
    return name
