"""Grows one trajectory of many turns: tokens are appended as they were made, and nothing is made twice.

It is used by episodes of the rollout, and for external agents whose requests it serves.
What the policy is shown is appended by ``show``, what the engine sampled by ``sample``, with the engine's own
log-probabilities and versions.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flotilla.shared.schemas.prompt_image import PromptImage, moved, within
from flotilla.shared.schemas.routing import RoutedExperts, RoutedSpan, laid_out, span_behind
from flotilla.shared.schemas.trajectory import Trajectory
from flotilla.shared.schemas.turns import FinishReason, Turn

Versions = tuple[tuple[int, int], ...]
"""Run-length ``(start, version)`` over the tokens of one completion."""


@dataclass
class RenderTally:
    """Counts what was appended and what was refused, of one session.

    Attributes:
        appended: contexts that continued what was recorded.
        refused: renders that would have tokenised recorded tokens again.
    """

    appended: int = 0
    refused: int = 0


class TrajectoryBuilder:
    """The tokens of one trajectory so far.

    Args:
        tally: counts renders, of all trajectories of a session.
    """

    def __init__(self, tally: RenderTally | None = None) -> None:
        self._tally = tally or RenderTally()
        self._token_ids: list[int] = []
        self._is_sampled: list[bool] = []
        self._log_probs: list[float] = []
        self._versions: list[tuple[int, int]] = []
        self._turns: list[Turn] = []
        self._observation = ""
        self._state: int | None = None
        self._is_fresh = False
        self._routed: list[RoutedSpan] = []
        self._images: list[PromptImage] = []

    @classmethod
    def continuing(
        cls,
        trajectory: Trajectory,
        num_turns: int,
        tally: RenderTally | None = None,
        first_images: Sequence[PromptImage] = (),
    ) -> "TrajectoryBuilder":
        """Continue behind the first turns of an earlier trajectory.

        Args:
            trajectory: the earlier one.
            num_turns: that are kept of it.
            tally: counts renders.
            first_images: those of its first prompt, where it lists none.

        Raises:
            ValueError: it has fewer turns.
        """
        if not 0 < num_turns <= len(trajectory.turns):
            raise ValueError(f"a trajectory of {len(trajectory.turns)} turns has not {num_turns} to continue")
        builder = cls(tally)
        turns = trajectory.turns[:num_turns]
        end = turns[-1].end
        builder._token_ids = trajectory.token_ids[:end].tolist()
        builder._is_sampled = trajectory.loss_mask[:end].astype(bool).tolist()
        builder._log_probs = trajectory.log_probs[:end].tolist()
        builder._versions = [run for run in trajectory.versions if run[0] < end]
        builder._turns = list(turns)
        builder._images = list(within(trajectory.images or first_images, 0, end))
        if trajectory.experts is not None:
            builder._routed = [RoutedSpan(0, min(end, trajectory.experts.num_tokens), trajectory.experts)]
        return builder

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens so far."""
        return tuple(self._token_ids)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt of the next completion: all tokens since the last one that stands alone began."""
        return tuple(self._token_ids[self._prompt_start :])

    @property
    def prompt_images(self) -> tuple[PromptImage, ...]:
        """The images in the prompt of the next completion, by their positions there."""
        return within(self._images, self._prompt_start, len(self._token_ids))

    @property
    def images(self) -> tuple[PromptImage, ...]:
        """All images so far."""
        return tuple(self._images)

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self._token_ids)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns that have a completion."""
        return tuple(self._turns)

    @property
    def has_context(self) -> bool:
        """Whether something was shown since the last completion, so that the next may be sampled."""
        return len(self._token_ids) > self._end

    @property
    def _prompt_start(self) -> int:
        if self._is_fresh:
            return self._end
        return next((turn.start for turn in reversed(self._turns) if turn.is_fresh), 0)

    @property
    def _end(self) -> int:
        return self._turns[-1].end if self._turns else 0

    def show(
        self,
        token_ids: Sequence[int],
        text: str = "",
        *,
        state: int | None = None,
        is_fresh: bool = False,
        images: Sequence[PromptImage] = (),
    ) -> None:
        """Append what the policy is shown before its next completion.

        Args:
            token_ids: of the prompt, an observation or tool results, the template's marks included; may be added to.
            text: the same for people; the first turn's is the group's prompt and need not be given.
            state: of the environment, as in ``Turn``.
            is_fresh: whether it is a whole prompt, and nothing before it is shown.
            images: among these tokens, by their positions there.
        """
        self._images += moved(images, len(self._token_ids))
        self._tally.appended += 1
        self._is_fresh = self._is_fresh or (is_fresh and bool(self._turns))
        self._token_ids += token_ids
        self._is_sampled += [False] * len(token_ids)
        self._log_probs += [0.0] * len(token_ids)
        self._observation += text
        self._state = self._state if state is None else state

    def sample(
        self,
        token_ids: npt.NDArray[np.int32],
        log_probs: npt.NDArray[np.float32],
        versions: Versions,
        finish_reason: FinishReason,
        text: str = "",
        experts: RoutedExperts | RoutedSpan | None = None,
    ) -> None:
        """Append a completion, as the engine returned it; one without a token leaves everything as it is.

        Tokens that have experts already keep them: under those what follows them was sampled. An interrupted completion
        that came without its experts, behind turns that have some, leaves everything as it is, too: nobody could
        replay what it would become. Blocks while a record is cut, unless it is what ``cut`` has made of it.

        Raises:
            ValueError: nothing was shown since the last completion.
        """
        if not self.has_context:
            raise ValueError("a completion needs something that was shown before it")
        if not len(token_ids) or (self._routed and experts is None and finish_reason is FinishReason.ABORTED):
            return
        start, sampled = self._end, len(self._token_ids)
        self._token_ids += token_ids.tolist()
        self._is_sampled += [True] * len(token_ids)
        self._log_probs += log_probs.tolist()
        for at, version in versions:
            # What is shown first has the version of the first sampled token; a later context that of the turn before.
            if not self._versions:
                self._versions.append((0, version))
            elif self._versions[-1][1] != version:
                self._versions.append((sampled + at, version))
        span = self.cut(experts) if isinstance(experts, RoutedExperts) else experts
        self._routed = [] if span is None else [*self._routed, span]
        observation = self._observation if self._turns else ""
        end = len(self._token_ids)
        self._turns.append(
            Turn(start, sampled, end, finish_reason, text, observation, state=self._state, is_fresh=self._is_fresh)
        )
        self._observation, self._state, self._is_fresh = "", None, False

    def cut(self, experts: RoutedExperts) -> RoutedSpan | None:
        """Cut out of a completion's record what ``sample`` appends; changes nothing. Blocks.

        Returns:
            None where tokens before its prompt have no experts.

        Raises:
            ValueError: the record is damaged.
        """
        known = self._routed[-1].end if self._routed else 0
        return span_behind(known, experts, self._prompt_start)

    def snapshot(self) -> "TrajectoryBuilder":
        """Copy what there is, which another thread builds while more is appended here; far cheaper than to build."""
        found = copy.copy(self)
        for name in ("_token_ids", "_is_sampled", "_log_probs", "_versions", "_turns", "_routed", "_images"):
            setattr(found, name, list(getattr(self, name)))
        return found

    def reward(self, value: float) -> None:
        """Add a reward to the last turn.

        Raises:
            ValueError: there is no turn, or the reward is not finite.
        """
        if not self._turns or not np.isfinite(value):
            raise ValueError(f"turn {len(self._turns)} cannot have the reward {value}")
        last = self._turns[-1]
        self._turns[-1] = replace(last, reward=value + (last.reward or 0.0))

    def build(self, finish_reason: FinishReason, first_images: Sequence[bytes] = (), **fields: Any) -> Trajectory:
        """Make the trajectory; what was shown and not answered is left out. Blocks while records are laid out.

        Args:
            finish_reason: of the episode.
            first_images: that everybody knows of its first prompt; it lists none where it was shown no others.
            fields: further fields of ``Trajectory``; ``text`` is that of the last turn unless given.
        """
        end = self._end or len(self._token_ids)
        images = within(self._images, 0, end)
        first_end = self._turns[0].sampled if self._turns else end
        if all(each.start < first_end for each in images) and [each.data for each in images] == list(first_images):
            images = ()
        is_routed = bool(self._routed) and self._routed[-1].end >= end - 1
        return Trajectory(
            token_ids=np.array(self._token_ids[:end], np.int32),
            loss_mask=np.array(self._is_sampled[:end], np.uint8),
            log_probs=np.array(self._log_probs[:end], np.float32),
            # A trajectory without a sampled token has no version; such a one is never forwarded.
            versions=tuple(self._versions) or ((0, 0),),
            finish_reason=finish_reason,
            turns=self.turns,
            images=images,
            experts=laid_out(self._routed, end - 1) if is_routed else None,
            **({"text": self._turns[-1].text if self._turns else ""} | fields),
        )
