"""Watches special tokens in prompts and completions: a template that does not fit the model shows there."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from flotilla.shared.schemas.health import SamplingReport


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """A tokenizer's special tokens.

    Attributes:
        ids: all of them.
        start: those that it begins every text with by itself; empty for most.
        stops: those that end a completion.
        name: the text of one.
    """

    ids: frozenset[int] = frozenset()
    start: tuple[int, ...] = ()
    stops: frozenset[int] = frozenset()
    name: Callable[[int], str] = str

    @classmethod
    def of(cls, tokenizer: Any, stops: Sequence[int]) -> "SpecialTokens":
        """Ask a tokenizer."""
        ids = frozenset(int(token) for token in tokenizer.all_special_ids)
        start = []
        for token in tokenizer("a")["input_ids"]:
            if token not in ids:
                break
            start.append(int(token))
        return cls(ids, tuple(start), frozenset(stops), lambda token: str(tokenizer.decode([token])))


@dataclass
class SamplingTally:
    """The counts of one session; see ``SamplingReport`` for their meaning."""

    special: SpecialTokens = SpecialTokens()
    session: str = field(default_factory=lambda: secrets.token_hex(4))
    counts: dict[str, int] = field(default_factory=dict)
    token: int | None = None

    def add_prompt(self, token_ids: Sequence[int]) -> None:
        """Count a prompt of a training task."""
        ids, start = self.special.ids, self.special.start
        doubled = [a for a, b in pairwise(token_ids) if a == b and a in ids]
        self._count("prompts")
        self._count("doubled_special", bool(doubled))
        self._count("without_start", tuple(token_ids[: len(start)]) != start)
        if doubled:
            self.token = doubled[0]

    def add_completion(self, token_ids: "np.ndarray[Any, np.dtype[np.int32]]") -> None:
        """Count a completion of a training task."""
        self._count("completions")
        passed = self.special.ids - self.special.stops
        found = np.flatnonzero(np.isin(token_ids[:-1], list(passed))) if passed else np.array([], dtype=np.int64)
        self._count("past_special", bool(found.size))
        if found.size:
            self.token = int(token_ids[int(found[0])])

    def _count(self, name: str, happened: bool = True) -> None:
        self.counts[name] = self.counts.get(name, 0) + happened

    def report(self) -> SamplingReport:
        """Make what is reported."""
        name = None if self.token is None else self.special.name(self.token)[:64]
        return SamplingReport(session=self.session, special_token=name, **self.counts)
