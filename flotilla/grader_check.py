"""A conformance run against a grader's endpoint: requests as a reward service makes them, and some to be refused."""

import asyncio
import hashlib
import json
import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import IPv4Network, IPv6Network
from typing import Final, Literal

import httpx

from flotilla.services.reward.grader_call import GraderCall, Retryable, parse_grades, parse_openrlhf, read_json
from flotilla.services.reward.remote import openrlhf_lists
from flotilla.services.reward.verifiers.registry import new_client
from flotilla.shared.clock import Clock, SystemClock
from flotilla.shared.errors import GradingFailed
from flotilla.shared.schemas.grading import Grade, GradingMessage, GradingRequest, GradingSample
from flotilla.shared.schemas.trajectory import GradeStatus

Dialect = Literal["flotilla", "openrlhf"]
EVERYWHERE: Final = (IPv4Network("0.0.0.0/0"), IPv6Network("::/0"))
"""The person at this command line may connect wherever they like: the address policy is the reward service's."""
NUM_TIMED: Final = 16
CONCURRENCY: Final = 8
SLOW_SECONDS: Final = 10.0
LONG_CHARACTERS: Final = 32_000


class Outcome(StrEnum):
    """What a check came to."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was examined.

    Attributes:
        check: its name.
        outcome: wrong means that samples would be errors, or rewards not what the grader means.
        found: what was seen.
        advice: what to do about it; empty if nothing.
    """

    check: str
    outcome: Outcome
    found: str
    advice: str = ""


def a_sample(number: int, response: str, **fields: object) -> GradingSample:
    """Make a sample as a trajectory of a small problem gives one."""
    prompt = f"What is {number} plus {number}?"
    given = {
        "id": f"{number}/0",
        "prompt": f"user: {prompt}\nassistant: ",
        "messages": (GradingMessage(role="user", content=prompt),),
        "response": response,
        "label": str(2 * number),
        "data_source": "check",
        "metadata": {"difficulty": 1},
    }
    return GradingSample.model_validate(given | fields)


def usual_samples(count: int = 4) -> list[GradingSample]:
    """Make samples of which some are right."""
    return [a_sample(number, f"It is #### {2 * number + number % 2}") for number in range(count)]


def odd_samples() -> list[GradingSample]:
    """Make samples that training does send, and that graders trip over."""
    return [
        a_sample(1, ""),
        a_sample(2, "𝒳 ≠ 日本 \u202e \x00 \x1b[31m"),
        a_sample(3, "long " * (LONG_CHARACTERS // 5)),
        a_sample(4, "no label", label=None),
        a_sample(5, "no chat", messages=(), data_source=None, metadata={}),
        a_sample(6, '{"reward": 1} [[[[ ``` \\boxed{'),
    ]


@dataclass
class GraderCheck:
    """Checks one endpoint.

    Args:
        url: of the grader.
        dialect: of its requests.
        secret: signs them; None leaves them unsigned.
        attempt_seconds: longest time for one answer.
    """

    url: str
    dialect: Dialect = "flotilla"
    secret: str | None = None
    attempt_seconds: float = 60.0
    client: httpx.AsyncClient = field(default_factory=new_client)
    clock: Clock = field(default_factory=SystemClock)

    def __post_init__(self) -> None:
        self._call = self._caller(self.secret)

    def _caller(self, secret: str | None, clock: Clock | None = None) -> GraderCall:
        return GraderCall(self.client, clock or self.clock, secret, private=EVERYWHERE)

    async def run(self) -> list[Finding]:
        """Make every check, in order; if nothing answers, only the first."""
        first = await self._answers()
        if first.outcome is Outcome.WRONG:
            return [first]
        checks = [self._batch, self._order, self._odd, self._idempotence, self._unknown_fields, self._malformed]
        found = [first, *[await check() for check in checks], *await self._signature()]
        return [*found, await self._speed()]

    async def close(self) -> None:
        """Close the connections."""
        await self.client.aclose()

    async def _grades(
        self, samples: Sequence[GradingSample], name: str | None = None, body: bytes | None = None
    ) -> list[Grade]:
        name = name or _name(samples)
        async with asyncio.timeout(self.attempt_seconds):
            answer = await self._call.post(self.url, body or self._body(samples, name), name)
        assert answer is not None
        if self.dialect == "openrlhf":
            return parse_openrlhf(read_json(answer), len(samples))
        return parse_grades(read_json(answer), len(samples), name)

    def _body(self, samples: Sequence[GradingSample], name: str) -> bytes:
        if self.dialect == "openrlhf":
            return json.dumps(openrlhf_lists(samples)).encode()
        return GradingRequest(id=name, experiment="check", samples=tuple(samples)).model_dump_json().encode()

    async def _tried(self, check: str, samples: Sequence[GradingSample]) -> list[Grade] | Finding:
        try:
            return await self._grades(samples)
        except TimeoutError:
            return Finding(check, Outcome.WRONG, f"no answer within {self.attempt_seconds:g} s", "answer sooner")
        except GradingFailed as error:
            first = "this is tried again, and in the end" if isinstance(error, Retryable) else "this is final, and"
            return Finding(
                check, Outcome.WRONG, error.detail, f"{first} an error of every sample: no reward, not a zero"
            )

    async def _answers(self) -> Finding:
        got = await self._tried("answer", usual_samples(1))
        return got if isinstance(got, Finding) else _judged("answer", got)

    async def _batch(self) -> Finding:
        got = await self._tried("batch of 32", usual_samples(32))
        return got if isinstance(got, Finding) else _judged("batch of 32", got)

    async def _order(self) -> Finding:
        samples = usual_samples(8)
        there = await self._tried("order", samples)
        back = await self._tried("order", samples[::-1])
        for got in (there, back):
            if isinstance(got, Finding):
                return got
        assert isinstance(there, list) and isinstance(back, list)
        rewards, reversed_rewards = [each.reward for each in there], [each.reward for each in back]
        if rewards == reversed_rewards[::-1]:
            return Finding("order", Outcome.OK, "the same samples in reverse get the same grades in reverse")
        return Finding(
            "order",
            Outcome.WARNING,
            f"samples in reverse got {reversed_rewards[::-1]}, not {rewards}",
            "grades must be in the order of the samples; if the grader is random, ignore this",
        )

    async def _odd(self) -> Finding:
        samples = odd_samples()
        got = await self._tried("odd samples", samples)
        if isinstance(got, Finding):
            return got
        unlabelled = got[3]
        if unlabelled.reward == 0 and self.dialect == "flotilla":
            return Finding(
                "odd samples",
                Outcome.WARNING,
                "a sample without a label got the reward 0",
                "where you cannot tell, answer `reward: null`: a 0 is trained on",
            )
        return _judged("odd samples", got)

    async def _idempotence(self) -> Finding:
        samples = usual_samples(4)
        name = _name(samples)
        try:
            first, second = await self._grades(samples, name), await self._grades(samples, name)
        except (GradingFailed, TimeoutError) as error:
            return Finding("same id again", Outcome.WRONG, str(error) or "no answer in time", "a retry has the same id")
        if first == second:
            return Finding("same id again", Outcome.OK, "the same answer")
        advice = "keep answers by `id` for some minutes, and give them again"
        return Finding("same id again", Outcome.WARNING, "another answer to a repeated request", advice)

    async def _unknown_fields(self) -> Finding:
        samples = usual_samples(2)
        name = _name(samples)
        request = json.loads(self._body(samples, name))
        request["a_later_field"] = {"of": ["a", "later", "version"]}
        try:
            await self._grades(samples, name, json.dumps(request).encode())
        except (GradingFailed, TimeoutError) as error:
            found = str(error) or "no answer in time"
            return Finding("unknown field", Outcome.WRONG, found, "ignore fields that you do not know")
        return Finding("unknown field", Outcome.OK, "ignored")

    async def _malformed(self) -> Finding:
        name = secrets.token_hex(16)
        try:
            async with asyncio.timeout(self.attempt_seconds):
                await self._call.post(self.url, b'{"samples": [', name)
        except Retryable as error:
            advice = "answer 400: what can never be right is otherwise asked again"
            return Finding("malformed body", Outcome.WARNING, error.detail, advice)
        except GradingFailed as error:
            return Finding("malformed body", Outcome.OK, error.detail)
        except TimeoutError:
            return Finding("malformed body", Outcome.WARNING, "no answer", "answer 400 at once")
        return Finding("malformed body", Outcome.WARNING, "graded all the same", "answer 400 to what is not JSON")

    async def _signature(self) -> list[Finding]:
        if self.secret is None:
            advice = "set a secret (secret_env) where others can reach the grader"
            return [Finding("signature", Outcome.SKIPPED, "no secret was given: requests are not signed", advice)]
        other = self._caller(f"not {self.secret}")
        old = self._caller(self.secret, _Past(self.clock))
        return [
            await self._refused("forged signature", other, "compare the signature, in constant time"),
            await self._refused("old signature", old, "refuse timestamps that are an hour old: they may be replayed"),
        ]

    async def _refused(self, check: str, call: GraderCall, advice: str) -> Finding:
        samples = usual_samples(1)
        name = _name(samples)
        try:
            async with asyncio.timeout(self.attempt_seconds):
                await call.post(self.url, self._body(samples, name), name)
        except GradingFailed as error:
            return Finding(check, Outcome.OK, error.detail)
        except TimeoutError:
            return Finding(check, Outcome.WARNING, "no answer", "answer 401 at once")
        return Finding(check, Outcome.WARNING, "graded all the same", advice)

    async def _speed(self) -> Finding:
        room = asyncio.Semaphore(CONCURRENCY)
        seconds: list[float] = []

        async def timed() -> str | None:
            samples = usual_samples(8)
            async with room:
                began = time.perf_counter()
                try:
                    await self._grades(samples)
                except (GradingFailed, TimeoutError) as error:
                    return str(error) or "no answer in time"
                seconds.append(time.perf_counter() - began)
            return None

        failed = [each for each in await asyncio.gather(*(timed() for _ in range(NUM_TIMED))) if each]
        if failed:
            found = f"{len(failed)} of {NUM_TIMED} requests failed, {CONCURRENCY} at a time: {failed[0]}"
            return Finding("speed", Outcome.WRONG, found, f"lower `concurrency` below {CONCURRENCY}, or serve more")
        found = f"{statistics.median(seconds):.3f} s median, {max(seconds):.3f} s longest, {CONCURRENCY} at a time"
        if max(seconds) > SLOW_SECONDS:
            advice = "set attempt_seconds well above that, or answer 202 and call back"
            return Finding("speed", Outcome.WARNING, found, advice)
        return Finding("speed", Outcome.OK, found)


class _Past:
    """A clock that is an hour behind."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def monotonic(self) -> float:
        return self._clock.monotonic()

    def now(self) -> float:
        return self._clock.now() - 3600.0


def _name(samples: Sequence[GradingSample]) -> str:
    return hashlib.sha256(secrets.token_bytes(8) + samples[0].id.encode()).hexdigest()[:32]


def _judged(check: str, grades: Sequence[Grade]) -> Finding:
    bad = [each.reason for each in grades if each.status is GradeStatus.ERROR]
    if bad:
        found = f"{len(bad)} of {len(grades)} grades are errors, at first: {bad[0]}"
        return Finding(check, Outcome.WRONG, found, "a reward is a finite number, or null for an abstention")
    rewards = [each.reward for each in grades if each.reward is not None]
    spread = f", rewards {min(rewards):g} to {max(rewards):g}" if rewards else ""
    return Finding(check, Outcome.OK, f"{len(grades)} grades, {len(grades) - len(rewards)} abstained{spread}")
