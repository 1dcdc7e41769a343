"""A user whom a language model plays, behind any OpenAI-compatible chat endpoint.

The policy is the assistant. What the model writes as the user is shown to the policy; a mark of the user's ends the
episode, and a score in the user's words is the turn's reward. What fails on the way is an error of the trajectory.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx

from flotilla.services.rollout.environments.base import Info, Observation, Step, without_thought
from flotilla.services.rollout.episodes.observations import text_of
from flotilla.shared.environment.settings import LOOPBACK, IPNetwork
from flotilla.shared.errors import EpisodeFailed
from flotilla.shared.net.absence import BUSY_STATUS, may_pass
from flotilla.shared.net.client.bounded_json import parse_json
from flotilla.shared.net.client.checked_transport import checked_client
from flotilla.shared.net.retry import OTHERS_FIRST_PAUSE_SECONDS, OTHERS_LONGEST_PAUSE_SECONDS, Backoff, retry
from flotilla.shared.vision.parts import are_parts

INSTRUCTION: Final = """\
You are a user who writes to an assistant. Stay in that role: write only what the user says next, in plain words. When \
you have what you came for, or see that you will not get it, write {stop} and nothing else."""
STOP: Final = "###STOP###"
BEGIN: Final = "(The assistant is ready.)"
"""What the model reads in the assistant's place before the user's first words."""
NUMBER: Final = r"[ \t]{0,9}(-?\d{1,9}(?:\.\d{1,9})?)"
THOUGHT: Final = "<think>"
PLACE: Final = re.compile(r"\{(\w+)\}")


class _Busy(EpisodeFailed):
    """The server may answer when it is asked again."""


class SimulatedUser:
    """Plays a user for one episode.

    Args:
        url: base URL of the server, such as ``http://127.0.0.1:8000/v1``.
        model: the model's name there.
        instruction: the system message, with places for columns of the row, such as ``{goal}``, and for ``{stop}``.
        begins: whether the user writes first, before the policy has said anything; else the row's prompt is what the
            user wrote first.
        stop: ends the episode where the user writes it.
        score: mark before a number in the user's words, such as ``SCORE:``: the last one is the turn's reward, and none
            is shown to the policy. None: no rewards.
        temperature: of the model's sampling.
        max_tokens: most tokens of what the user writes at a time.
        networks: that are not public, and that the URL may lead to.

    Raises:
        ValueError: an option is not what it may be.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        instruction: str = INSTRUCTION,
        begins: bool = False,
        stop: str = STOP,
        score: str | None = None,
        networks: Sequence[IPNetwork] = LOOPBACK,
        **sampling: float,
    ) -> None:
        if unknown := sampling.keys() - {"temperature", "max_tokens"}:
            raise ValueError(f"there is no option {min(unknown)}")
        for name, text in {"model": model, "instruction": instruction, "stop": stop, "score": score}.items():
            if (text is not None or name != "score") and (not isinstance(text, str) or not text):
                raise ValueError(f"{name} must be a text, got {text!r}")
        if not isinstance(begins, bool):
            raise TypeError(f"begins must be true or false, got {begins!r}")
        for name, low in (("temperature", 0), ("max_tokens", 1)):
            value = sampling.get(name, low)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < math.inf:
                raise ValueError(f"{name} must be a number from {low}, got {value!r}")
        # Marks, not patterns of the spec's: another model's words are searched beside the service's other work.
        self._score = None if score is None else re.compile(re.escape(score) + NUMBER)
        self.name = f"user:{url}"
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._body = {"model": model, "temperature": 1.0, "max_tokens": 512, **sampling}
        self._instruction, self._begins, self._stop = instruction, begins, stop
        self._networks = networks
        self._client: httpx.AsyncClient | None = None
        self._messages: list[dict[str, str]] = []
        self._seed = 0

    async def reset(self, seed: int, row: Mapping[str, Any]) -> tuple[Observation, Info]:
        """Begin; see ``row_of`` for what ``row`` has.

        Raises:
            EpisodeFailed: the server cannot be reached, or the instruction names a column that the row lacks.
        """
        self._seed = seed % 2**31
        self._client = checked_client(self._networks, None)
        self._messages = [
            {"role": "system", "content": self._told(row)},
            {"role": "user", "content": BEGIN},
        ]
        if self._begins:
            shown, _, is_done = await self._next()
            if is_done:
                raise EpisodeFailed("the user ended the conversation before it began")
            return shown, {}
        if not row.get("prompt"):
            raise EpisodeFailed("the row has no message of the user's: give it one, or set the option begins")
        self._messages.append({"role": "assistant", "content": str(row["prompt"])})
        return "", {}

    async def step(self, text: str) -> Step:
        """Send the policy's text to the user, and let the user answer.

        Raises:
            EpisodeFailed: the server cannot be reached, or its answer is none.
        """
        self._messages.append({"role": "user", "content": without_thought(text).strip()})
        shown, reward, is_done = await self._next()
        return shown, reward, is_done, False, {}

    async def close(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _told(self, row: Mapping[str, Any]) -> str:
        places = {**row, "stop": self._stop}

        def value(found: re.Match[str]) -> str:
            if found[1] not in places:
                raise EpisodeFailed(
                    f"instruction has {found[0]}, and the row has no such column; it has {', '.join(sorted(places))}"
                )
            return str(places[found[1]])

        return PLACE.sub(value, self._instruction)

    async def _next(self) -> tuple[Observation, float, bool]:
        backoff = Backoff(OTHERS_FIRST_PAUSE_SECONDS, OTHERS_LONGEST_PAUSE_SECONDS)
        # The episode's bound of a step ends the attempts.
        answer = await retry(
            self._ask,
            waiting_for="simulated user",
            backoff=backoff,
            is_retryable=lambda error: isinstance(error, _Busy),
        )
        images = [each for each in answer if not isinstance(each, str) and each.get("type") != "text"]
        text = text_of(answer)
        self._messages.append({"role": "assistant", "content": text})
        # A thought that is cut before its end is no word of the user's.
        said = without_thought(text).partition(THOUGHT)[0]
        reward = 0.0
        if self._score is not None:
            scores = self._score.findall(said)
            reward, said = float(scores[-1]) if scores else 0.0, self._score.sub("", said)
        shown, mark, _ = said.partition(self._stop)
        if not mark and not shown.strip() and not images:
            raise EpisodeFailed("the model that plays the user said nothing: if it thinks, give it more max_tokens")
        seen = shown.strip()
        return [{"type": "text", "text": seen}, *images] if images else seen, reward, bool(mark)

    async def _ask(self) -> Observation:
        if self._client is None:
            raise EpisodeFailed("the conversation has ended")
        body = {**self._body, "messages": self._messages, "seed": self._seed}
        try:
            reply = await self._client.post(self._url, json=body)
        except httpx.HTTPError as error:
            words = f"the model that plays the user cannot be reached: {error or type(error).__name__}"
            raise (_Busy if may_pass(error) else EpisodeFailed)(words) from error
        if reply.status_code != 200:
            words = f"the model that plays the user answered {reply.status_code}: {reply.text[:300]}"
            raise (_Busy if reply.status_code in BUSY_STATUS else EpisodeFailed)(words)
        try:
            answer: Any = parse_json(reply.content)
            text = answer["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError):
            text = None
        if isinstance(text, str):
            return text
        if are_parts(text):
            parts: Observation = text
            return parts
        raise EpisodeFailed("the answer of the model that plays the user has no text at choices[0].message.content")
