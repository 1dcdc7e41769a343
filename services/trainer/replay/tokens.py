"""One sample taken apart, token by token: what training did with each, and why, in words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flotilla.services.trainer.replay.replay import Replayed
from flotilla.shared.errors import NotFound
from flotilla.shared.schemas.sample_kinds import TrainedTokens
from flotilla.shared.schemas.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One sampled token; log-probabilities in nats, None where there is none.

    Attributes:
        position, token_id, text: which.
        version, lag: that sampled it; versions from that one to the trained one.
        sampled: log-probability when it was sampled.
        old: denominator of the ratio.
        now: under the weights of the update.
        ratio: exp(now - old).
        is_clipped: whether a clip or gate changed its gradient.
        advantage: of the token.
        weight: what its loss was multiplied with.
        why: what followed from that.
    """

    position: int
    token_id: int
    text: str
    version: int
    lag: int
    sampled: float
    old: float | None
    now: float | None
    ratio: float | None
    is_clipped: bool
    advantage: float | None
    weight: float | None
    why: str


def take_apart(replayed: Replayed, group_id: int, member: int) -> list[TokenRow]:
    """Describe each sampled token of a sample.

    Raises:
        NotFound: the step has no such sample.
    """
    for kept, found in zip(replayed.groups, replayed.now, strict=True):
        if kept.group.task.group_id == group_id and member < len(kept.group.trajectories):
            recorded = kept.tokens[member] if kept.tokens else None
            lags = recorded.lags if recorded is not None else ()
            return list(_rows(kept.group.trajectories[member], found[member], lags, _decoder(replayed)))
    ids = ", ".join(str(kept.group.task.group_id) for kept in replayed.groups)
    raise NotFound(f"step {replayed.step} has no sample {group_id}.{member}; its groups are {ids}")


def explain(
    *, advantage: float | None, now: float | None, ratio: float | None, weight: float | None, clipped: bool
) -> str:
    """Return in words what a token's figures did to its probability."""
    if advantage is None:
        return "not trained: its sample has no reward"
    if advantage == 0:
        return "no gradient: its advantage is 0, as where all answers of a group have the same reward"
    if weight == 0:
        return "no gradient: rejected, sampler and trainer disagree too much about it"
    wanted = "more" if advantage > 0 else "less"
    if clipped and ratio is not None:
        return f"clipped: it already is {wanted} likely than when it was sampled, {ratio:.3f} times"
    if now is None or weight is None:
        return f"to become {wanted} likely"
    scaled = "" if math.isclose(weight, 1.0, abs_tol=1e-6) else f", with {weight:.3f} of its weight"
    return f"made {wanted} likely{scaled}"


def _rows(
    trajectory: Trajectory, now: TrainedTokens | None, lags: Sequence[tuple[int, int]], decode: "Decoder"
) -> "list[TokenRow]":
    versions = trajectory.token_versions()
    rows = []
    for position in np.flatnonzero(trajectory.loss_mask).tolist():
        old, current = _value(now, "old_log_probs", position), _value(now, "log_probs", position)
        ratio = None if old is None or current is None else math.exp(min(current - old, 20.0))
        advantage, weight = _value(now, "advantages", position), _value(now, "weights", position)
        is_clipped = bool(_value(now, "clipped", position))
        token = int(trajectory.token_ids[position])
        rows.append(
            TokenRow(
                position=position,
                token_id=token,
                text=decode(token),
                version=int(versions[position]),
                lag=([lag for start, lag in lags if start <= position] or [0])[-1],
                sampled=float(trajectory.log_probs[position]),
                old=old,
                now=current,
                ratio=ratio,
                is_clipped=is_clipped,
                advantage=advantage,
                weight=weight,
                why=explain(advantage=advantage, now=current, ratio=ratio, weight=weight, clipped=is_clipped),
            )
        )
    return rows


class Decoder:
    """Writes a token id as text; as its number where there is no tokenizer."""

    def __init__(self, tokenizer: object | None) -> None:
        self._tokenizer = tokenizer

    def __call__(self, token: int) -> str:
        """Decode one token."""
        if self._tokenizer is None:
            return str(token)
        text: str = self._tokenizer.decode([token])  # type: ignore[attr-defined]
        return text


def _decoder(replayed: Replayed) -> Decoder:
    from transformers import AutoTokenizer

    try:
        return Decoder(AutoTokenizer.from_pretrained(replayed.model))
    except (OSError, ValueError):
        return Decoder(None)


def _value(tokens: TrainedTokens | None, name: str, position: int) -> float | None:
    if tokens is None:
        return None
    value = float(getattr(tokens, name)[position])
    return None if math.isnan(value) else value
