"""A language model as judge, asked through an OpenAI-compatible endpoint.

A vote that cannot be had or read is no vote; without more than half of them the sample is an error, never a zero. What
the samples say is the policy's, so it is put into the question in one pass: placeholders inside it are not replaced.
"""

import asyncio
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from flotilla.services.reward.grader_call import GraderCall, Reachability, Retryable, asked_pause, read_json
from flotilla.services.reward.verdicts import no_verdict, question_of, reward_of
from flotilla.shared.clock import Clock, SystemClock
from flotilla.shared.config.sections.judge import JudgeConfig
from flotilla.shared.environment.settings import LOOPBACK, IPNetwork
from flotilla.shared.errors import GradingFailed
from flotilla.shared.net.client.address_policy import Resolver, resolve
from flotilla.shared.net.retry import OTHERS_FIRST_PAUSE_SECONDS, OTHERS_LONGEST_PAUSE_SECONDS, Backoff, retry
from flotilla.shared.schemas.grading import Grade, GradingSample
from flotilla.shared.schemas.service import JUDGE, Failure


@dataclass(frozen=True, slots=True)
class _Vote:
    """One reply of the judge; ``reward`` None, with a reason, if it has none."""

    reward: float | None
    reason: str = ""
    prompt_tokens: float = 0.0
    completion_tokens: float = 0.0


class JudgeVerifier:
    """Asks a judge.

    Args:
        config: the component's section.
        client: closed by this object; must not follow redirects nor use the environment's proxies.
        api_key: sent as bearer token; None sends none.
        private: private networks that may be called, if the spec sets ``allow_private``.
        backoff_seconds: the first pause between attempts.
    """

    def __init__(
        self,
        config: JudgeConfig,
        client: httpx.AsyncClient,
        api_key: str | None = None,
        *,
        private: Sequence[IPNetwork] = LOOPBACK,
        resolver: Resolver = resolve,
        clock: Clock | None = None,
        backoff_seconds: float = OTHERS_FIRST_PAUSE_SECONDS,
    ) -> None:
        self._config = config
        self._client = client
        self._clock = clock or SystemClock()
        self._backoff_seconds = backoff_seconds
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        allowed = private if config.allow_private else ()
        self._call = GraderCall(
            client, self._clock, private=allowed, resolver=resolver, headers=headers, peer="the judge"
        )
        self._url = config.url.rstrip("/") + "/chat/completions"
        self._reachability = Reachability(JUDGE)
        self._room = asyncio.Semaphore(config.concurrency)

    @property
    def problem(self) -> Failure | None:
        """The judge, where it did not answer when it was last asked."""
        return self._reachability.problem

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        """Grade each sample by its votes."""
        votes = self._config.votes
        asked = [self._vote(sample, number) for sample in samples for number in range(votes)]
        found = await asyncio.gather(*asked)
        return [self._grade(found[start : start + votes]) for start in range(0, len(found), votes)]

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def _grade(self, votes: Sequence[_Vote]) -> Grade:
        config = self._config
        rewards = [vote.reward for vote in votes if vote.reward is not None]
        if 2 * len(rewards) <= len(votes):
            reasons = [vote.reason for vote in votes if vote.reward is None]
            return Grade.error(f"the judge gave {len(rewards)} of {len(votes)} votes: {reasons[0]}")
        match config.aggregate:
            case "mean":
                reward = statistics.fmean(rewards)
            case "median":
                reward = statistics.median(rewards)
            case "majority":
                reward = Counter(rewards).most_common(1)[0][0]
        prompt, completion = sum(v.prompt_tokens for v in votes), sum(v.completion_tokens for v in votes)
        cost = (
            prompt * config.dollars_per_million_prompt_tokens
            + completion * config.dollars_per_million_completion_tokens
        ) / 1e6
        metrics = {
            "votes": float(len(rewards)),
            "disagreement": max(rewards) - min(rewards),
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "cost_dollars": cost,
        }
        return Grade.scored(reward, metrics=metrics)

    async def _vote(self, sample: GradingSample, number: int) -> _Vote:
        try:
            async with self._room:
                answer = read_json(await self._ask(self._body(sample), f"{sample.id}/{number}"))
            return self._read(answer)
        except GradingFailed as error:
            return _Vote(None, error.detail)

    def _body(self, sample: GradingSample) -> bytes:
        config = self._config
        messages = [{"role": "user", "content": question_of(sample, config)}]
        if config.system is not None:
            messages.insert(0, {"role": "system", "content": config.system})
        body = {
            "model": config.model,
            "messages": messages,
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
        }
        return json.dumps(body).encode()

    async def _ask(self, body: bytes, name: str) -> bytes:
        config = self._config
        attempts = 0

        async def attempt() -> bytes:
            nonlocal attempts
            attempts += 1
            with self._reachability.asking(self._url):
                return await self._post(body, name)

        try:
            return await retry(
                attempt,
                waiting_for="judge",
                deadline_seconds=config.deadline_seconds,
                backoff=Backoff(self._backoff_seconds, OTHERS_LONGEST_PAUSE_SECONDS, pause_at_least=asked_pause),
                is_retryable=lambda error: isinstance(error, Retryable) and attempts < config.max_attempts,
                now=self._clock.monotonic,
            )
        except Retryable as error:
            raise GradingFailed(f"the judge failed {attempts} times, at last: {error.detail}") from error

    async def _post(self, body: bytes, name: str) -> bytes:
        try:
            async with asyncio.timeout(self._config.attempt_seconds):
                answer = await self._call.post(self._url, body, name)
        except TimeoutError:
            raise Retryable("no answer in time") from None
        assert answer is not None
        return answer

    def _read(self, answer: object) -> _Vote:
        try:
            text: Any = answer["choices"][0]["message"]["content"]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            raise GradingFailed("the judge's answer has no text at choices[0].message.content")
        usage = answer.get("usage") if isinstance(answer, Mapping) else None
        tokens = [_count(usage, name) for name in ("prompt_tokens", "completion_tokens")]
        reward = reward_of(text, self._config)
        return _Vote(reward, "" if reward is not None else no_verdict(text), *tokens)


def _count(usage: object, name: str) -> float:
    value = usage.get(name) if isinstance(usage, Mapping) else None
    return value if isinstance(value, float) and math.isfinite(value) and value >= 0 else 0.0
