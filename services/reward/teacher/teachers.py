"""Asks teachers behind URLs about the tokens of groups that are to be trained.

A server that does not answer is waited for, however long, and named: nothing is trained without its word. One that
refuses a sample, or answers what is no log-probability, is an error of that sample. One that reads other tokens than
the policy writes ends the experiment: everything that it says would be about something else.
"""

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import httpx
import numpy as np
import numpy.typing as npt

from flotilla.services.reward.grader_call import GraderCall, Retryable, asked_pause
from flotilla.services.reward.verifiers.registry import Surroundings, new_client, secret_of
from flotilla.shared.clock import Clock, SystemClock
from flotilla.shared.config.sections.distillation import DistillationConfig, TeacherServerConfig
from flotilla.shared.environment.settings import LOOPBACK, IPNetwork
from flotilla.shared.errors import GradingFailed, ModelError
from flotilla.shared.net.client.address_policy import AddressRefused, Resolver, resolve
from flotilla.shared.net.client.bounded_json import parse_json
from flotilla.shared.net.retry import OTHERS_FIRST_PAUSE_SECONDS, Backoff, retry
from flotilla.shared.schemas.trajectory import GradeStatus, Group, Trajectory

log = logging.getLogger(__name__)

LONGEST_PAUSE_SECONDS = 10.0
BROKEN_STATUS, MOST_BROKEN = 500, 4
"""A server that fails on a sample answers with this status; after so many times it is the sample's fault."""
DETOKENIZE = "/detokenize"

Answer = TypeVar("Answer")


Body = dict[str, Any]

BYTES_OF_AN_ANSWER: Final = 64 * 1024
BYTES_PER_TOKEN: Final = 1024
"""vLLM writes some hundred bytes for each."""
VALUES_OF_AN_ANSWER: Final = 2000
VALUES_PER_TOKEN: Final = 32
NO_LOG_PROB: Final = -9000.0
"""Below it is no number: vLLM writes -9999 in place of minus infinity."""
ROUNDING: Final = 1e-3
"""A log-probability may be so much above 0, in nats: servers compute in bfloat16."""


def score_request(config: TeacherServerConfig, token_ids: Sequence[int], start: int) -> tuple[str, Body]:
    """Make the path and the body that ask for the log-probs of the tokens from ``start`` on, which is at least 1."""
    ids = list(token_ids)
    if config.kind == "sglang":
        # The first entry of the answer has no value: it is asked for the one before.
        sampling = {"max_new_tokens": 0, "temperature": 1.0}
        asked = {"return_logprob": True, "logprob_start_len": start - 1}
        return "/generate", {"input_ids": ids, "sampling_params": sampling, **asked}
    body: Body = {} if config.model is None else {"model": config.model}
    body |= {"prompt": ids, "max_tokens": 1, "temperature": 1.0}
    return "/v1/completions", body | (
        {"prompt_logprobs": 0} if config.kind == "vllm" else {"echo": True, "logprobs": 1}
    )


def most_bytes(num_tokens: int) -> int:
    """Bound an answer about so many tokens."""
    return BYTES_OF_AN_ANSWER + BYTES_PER_TOKEN * num_tokens


def read_answer(content: bytes, num_tokens: int) -> object:
    """Parse an answer about so many tokens; whole numbers become floats.

    Raises:
        GradingFailed: it is not JSON, or has too many values or levels.
    """
    try:
        return parse_json(content, max_values=VALUES_OF_AN_ANSWER + VALUES_PER_TOKEN * num_tokens)
    except ValueError as error:
        raise GradingFailed(f"the teacher's answer {error}") from None


def log_probs_of(config: TeacherServerConfig, answer: object, token_ids: Sequence[int], start: int) -> list[float]:
    """Read the log-probs [len(token_ids) - start], in nats, of the tokens from ``start`` on.

    Raises:
        GradingFailed: the answer is not as expected, is about other tokens, or holds what is no log-probability.
    """
    wanted = list(token_ids[start:])
    try:
        pairs = _READERS[config.kind](answer, token_ids, start)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise GradingFailed(f"the teacher's answer is not as kind {config.kind} gives it: {error!r}"[:300]) from None
    if len(pairs) != len(wanted):
        raise GradingFailed(f"the teacher's answer has {len(pairs)} log-probabilities for {len(wanted)} tokens")
    found: list[float] = []
    for place, ((token, value), token_id) in enumerate(zip(pairs, wanted, strict=True), start=start):
        if token is not None and token != token_id:
            raise GradingFailed(
                f"the teacher's answer has token {token!r} at position {place}, which is {token_id}"[:300]
            )
        if not isinstance(value, float) or not math.isfinite(value) or not NO_LOG_PROB < value <= ROUNDING:
            given = repr(value)[:40] if isinstance(value, float) else f"a {type(value).__name__}"
            raise GradingFailed(f"the teacher's log-probability at position {place} is none: {given}")
        found.append(value)
    return found


_Pairs = list[tuple[object, object]]
"""The id of each token, None if the server omits it, and its log-probability."""


def _of_sglang(answer: Any, token_ids: Sequence[int], start: int) -> _Pairs:
    entries = answer["meta_info"]["input_token_logprobs"]
    return [(entry[1], entry[0]) for entry in entries[1:]]


def _of_vllm(answer: Any, token_ids: Sequence[int], start: int) -> _Pairs:
    entries = answer["choices"][0]["prompt_logprobs"]
    if len(entries) != len(token_ids):
        raise ValueError(f"{len(entries)} entries for {len(token_ids)} tokens")
    # Keys are token ids in decimal digits; there may be likelier tokens beside the given one.
    return [
        (None, entry[str(token_id)]["logprob"])
        for entry, token_id in zip(entries[start:], token_ids[start:], strict=True)
    ]


def _of_openai(answer: Any, token_ids: Sequence[int], start: int) -> _Pairs:
    values = answer["choices"][0]["logprobs"]["token_logprobs"]
    if len(values) - len(token_ids) not in {0, 1}:
        raise ValueError(f"{len(values)} entries for {len(token_ids)} tokens, and at most one sampled")
    return [(None, value) for value in values[start : len(token_ids)]]


_READERS = {"sglang": _of_sglang, "vllm": _of_vllm, "openai": _of_openai}


def text_of(answer: object) -> str | None:
    """Read what ``/detokenize`` answers: SGLang calls it text, vLLM prompt; None if it has neither."""
    if not isinstance(answer, Mapping):
        return None
    found = answer.get("text", answer.get("prompt"))
    return found if isinstance(found, str) else None


def reads_alike(theirs: str, ours: str) -> bool:
    """Return whether two decodings are of the same tokens; special tokens, white space and cut characters are left out.

    Args:
        theirs: the teacher's, perhaps with special tokens.
        ours: the rollout's, without, and perhaps cut where a stop string was found.
    """
    return _bare(ours) in _bare(theirs)


def _bare(text: str) -> str:
    return "".join(character for character in text if not character.isspace() and character != "\ufffd")


class Teachers:
    """The teachers of an experiment, chosen by data source.

    Args:
        servers: their sections.
        client: closed by this object; must not follow redirects nor use the environment's proxies.
        keys: API keys by index of the server; one that is missing sends none.
        private: private networks that may be called, if a section sets ``allow_private``.
        pause_seconds: the first pause between attempts.
    """

    def __init__(
        self,
        servers: Sequence[TeacherServerConfig],
        client: httpx.AsyncClient,
        keys: Mapping[int, str] | None = None,
        *,
        private: Sequence[IPNetwork] = LOOPBACK,
        resolver: Resolver = resolve,
        clock: Clock | None = None,
        pause_seconds: float = OTHERS_FIRST_PAUSE_SECONDS,
    ) -> None:
        self._client = client
        self._servers = [
            _Server(config, client, (keys or {}).get(index), private, resolver, clock or SystemClock(), pause_seconds)
            for index, config in enumerate(servers)
        ]

    @property
    def problem(self) -> str | None:
        """What is waited for; None if nothing is."""
        return next((each.problem for each in self._servers if each.problem is not None), None)

    @property
    def refusal(self) -> str | None:
        """Why a teacher can never teach this policy; None if no reason is known."""
        return next((each.refusal for each in self._servers if each.refusal is not None), None)

    async def judged(self, group: Group) -> Group:
        """Write a teacher's log-probs onto every scored member; one that a teacher refuses becomes an error.

        Waits for servers that do not answer.

        Raises:
            ModelError: a teacher can never teach this policy.
        """
        server = next((each for each in self._servers if each.teaches(group.task.data_source)), None)
        async with asyncio.TaskGroup() as asked:
            tasks = [asked.create_task(self._judged(server, each)) for each in group.trajectories]
        if self.refusal is not None:
            raise ModelError(self.refusal)
        return replace(group, trajectories=tuple(task.result() for task in tasks))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _judged(self, server: "_Server | None", trajectory: Trajectory) -> Trajectory:
        if trajectory.status is not GradeStatus.SCORED or trajectory.is_baseline:
            return trajectory
        try:
            if server is None:
                raise GradingFailed("no teacher has the data source of this sample")
            return replace(trajectory, teacher_log_probs=await server.log_probs(trajectory))
        except GradingFailed as error:
            return trajectory.graded(GradeStatus.ERROR, None, components={}, reason=f"teacher: {error.detail}")


def open_teachers(config: DistillationConfig | None, surroundings: Surroundings) -> Teachers | None:
    """Make the teachers of an experiment; None where none is behind a URL.

    Raises:
        InvalidSpec: an API key is not set.
    """
    if config is None or not config.servers:
        return None
    found = [secret_of(each.api_key_env, "api_key_env", surroundings) for each in config.servers]
    keys = {index: key for index, key in enumerate(found) if key is not None}
    return Teachers(config.servers, new_client(), keys, private=surroundings.grader_networks)


class _Server:
    """One of them; arguments as of ``Teachers``."""

    def __init__(
        self,
        config: TeacherServerConfig,
        client: httpx.AsyncClient,
        key: str | None,
        private: Sequence[IPNetwork],
        resolver: Resolver,
        clock: Clock,
        pause_seconds: float,
    ) -> None:
        self._config = config
        self._clock = clock
        self._pause_seconds = pause_seconds
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        allowed = private if config.allow_private else ()
        self._call = GraderCall(
            client, clock, private=allowed, resolver=resolver, headers=headers, peer=f"the teacher {config.url}"
        )
        self._room = asyncio.Semaphore(config.concurrency)
        self._is_compared = False
        self.problem: str | None = None
        self.refusal: str | None = None

    def teaches(self, data_source: str | None) -> bool:
        return self._config.data_sources is None or data_source in self._config.data_sources

    async def log_probs(self, trajectory: Trajectory) -> npt.NDArray[np.float32]:
        """Ask for the log-probs [T] of the sampled tokens; 0 elsewhere.

        Raises:
            GradingFailed: the server refuses the sample, or answers what is no log-probability.
        """
        found = np.zeros(trajectory.token_ids.shape[0], np.float32)
        sampled = np.flatnonzero(trajectory.loss_mask)
        if not sampled.size:
            return found
        start, token_ids = int(sampled[0]), trajectory.token_ids.tolist()
        if start == 0:
            raise GradingFailed("a sample without a prompt has a token that nothing predicts")
        async with self._room:
            if not self._is_compared:
                await self._waiting(lambda: self._compare(trajectory))
            path, body = score_request(self._config, token_ids, start)
            content = await self._waiting(lambda: self._post(path, body, most_bytes(len(token_ids))))
        answer = read_answer(content, len(token_ids))
        found[start:] = log_probs_of(self._config, answer, token_ids, start)
        found[trajectory.loss_mask == 0] = 0.0
        return found

    async def _waiting(self, attempt: Callable[[], Awaitable[Answer]]) -> Answer:
        """Try until the server answers, and name it meanwhile."""
        num_broken = 0

        def is_retryable(error: Exception) -> bool:
            nonlocal num_broken
            if not isinstance(error, Retryable):
                return False
            num_broken += error.answered == BROKEN_STATUS
            self.problem = self.problem or error.detail
            return num_broken < MOST_BROKEN

        pauses = Backoff(self._pause_seconds, LONGEST_PAUSE_SECONDS, pause_at_least=asked_pause)
        return await retry(
            attempt, waiting_for="teacher", backoff=pauses, is_retryable=is_retryable, now=self._clock.monotonic
        )

    async def _post(self, path: str, body: Mapping[str, object], max_bytes: int) -> bytes:
        encoded = json.dumps(body, sort_keys=True).encode()
        name = hashlib.sha256(encoded).hexdigest()[:32]
        try:
            async with asyncio.timeout(self._config.attempt_seconds):
                url = self._config.url.rstrip("/") + path
                content = await self._call.post(url, encoded, name, max_bytes=max_bytes)
        except TimeoutError:
            raise Retryable(
                f"the teacher {self._config.url} gave no answer in {self._config.attempt_seconds:g} s"
            ) from None
        except Retryable:
            raise
        except GradingFailed as error:
            self.problem = None
            if isinstance(error, AddressRefused):
                self.refusal = error.detail
            raise
        self.problem = None
        assert content is not None
        return content

    async def _compare(self, trajectory: Trajectory) -> None:
        """Let the server decode what the policy sampled: a server that reads another text has other tokens."""
        run = last_run(trajectory)
        if not trajectory.text.strip() or self._is_compared:
            return
        body: dict[str, object] = {} if self._config.model is None else {"model": self._config.model}
        try:
            content = await self._post(DETOKENIZE, body | {"tokens": run}, most_bytes(len(run)))
            theirs = text_of(read_answer(content, len(run)))
        except Retryable:
            raise
        except GradingFailed as error:
            log.info(
                "a teacher does not report how it tokenises", extra={"url": self._config.url, "error": error.detail}
            )
            theirs = None
        self._is_compared = True
        if theirs is not None and not reads_alike(theirs, trajectory.text):
            self.refusal = (
                f"the teacher {self._config.url} reads the tokens of {trajectory.text[:80]!r} as {theirs[:80]!r}: its "
                "token ids must be those of model.path"
            )


def last_run(trajectory: Trajectory) -> list[int]:
    """Return the last run of sampled token ids: those that the trajectory's text was decoded from."""
    mask = trajectory.loss_mask.astype(bool)
    sampled = np.flatnonzero(mask)
    if not sampled.size:
        return []
    end = int(sampled[-1]) + 1
    breaks = np.flatnonzero(~mask[:end])
    found: list[int] = trajectory.token_ids[(int(breaks[-1]) + 1 if breaks.size else 0) : end].tolist()
    return found
