"""Holds what an experiment says against what it must have done: ledger, lineage, checkpoint, versions, lengths."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.errors import NotFound
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.streams.intervals import IntervalSet

REASONED = ("filtered", "dropped", "failed")
ENDED = "experiment_ended"
"""Reason of what was under way when the experiment was stopped."""
DECILES = 10


@dataclass(frozen=True)
class Account:
    """The end of a run.

    Attributes:
        steps, issued, trained: of the whole run; trained groups are in its last checkpoint.
        lost: groups issued that are neither trained nor have a reason.
        trained_twice: groups that stand more than once in the lineage.
        is_lineage_checkpoint: whether the lineage of all steps and the checkpoint hold the same groups.
        balanced: the last ledger's own verdict.
        reasons: how many groups ended otherwise, and why.
        over_max_lag_groups: groups of steps that trained a token older than ``max_lag``, from the stored versions;
            numbers of lost versions do not count.
        largest_lag, max_lag: what occurred, and what was allowed.
        discarded_token_share: tokens (by their characters) of groups that were graded and never trained, but for those
            under way at the end, over those of all graded groups.
        graded_again_share: answers that were graded once more because whoever held their group died.
        deciles: prompts by the mean length of their answers, fastest first; see ``Decile``.
        slowest_over_fastest: trained share of the last decile over that of the first; None where the run was too short
            to train one of the first.
    """

    steps: int
    issued: int
    trained: int
    lost: int
    trained_twice: int
    is_lineage_checkpoint: bool
    balanced: bool
    reasons: Mapping[str, Mapping[str, int]]
    over_max_lag_groups: int
    largest_lag: int
    max_lag: int
    discarded_token_share: float
    graded_again_share: float
    deciles: "tuple[Decile, ...]"
    slowest_over_fastest: float | None

    @property
    def is_sound(self) -> bool:
        """Whether nothing was lost, trained twice, miscounted or too old."""
        exact = self.lost == 0 and self.trained_twice == 0 and self.is_lineage_checkpoint and self.balanced
        return exact and self.over_max_lag_groups == 0

    def to_dict(self) -> dict[str, Any]:
        """Make it JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Decile:
    """A tenth of the prompts.

    Attributes:
        mean_length: characters of an answer.
        issued: groups of these prompts, without those under way at the end.
        trained: how many of them were trained.
    """

    mean_length: float
    issued: int
    trained: int


async def account(client: GatewayClient, experiment_id: str, directory: Path, *, rows: int) -> Account:
    """Account for an experiment that was stopped.

    Args:
        client: of its gateway.
        experiment_id: the experiment's.
        directory: where its grader notes lengths.
        rows: prompts of its dataset.
    """
    base = f"/v1/experiments/{experiment_id}"
    view = await client.call("GET", base, deadline_seconds=30)
    spec = validate_spec(view["spec"])
    ledger = (await client.call("GET", f"{base}/ledger", deadline_seconds=30))["train"]
    listed, steps, lost_versions, closed = newest_checkpoint(Path(view["directory"]))
    plans = [plan for step in range(1, steps + 1) if (plan := await _plan(client, base, step)) is not None]
    lineage = Counter(group_id for plan in plans for group_id in plan["group_ids"])
    # Of those that were closed the lineage says which were trained, and the checkpoint how many.
    in_checkpoint = {each for each in listed if each >= closed["below"] or each in lineage}
    is_counted = len(listed) - len(in_checkpoint) == closed["untrained"]
    max_lag = spec.asynchrony.resolved_max_lag
    lags = [(lag_of(plan, lost_versions), len(plan["group_ids"])) for plan in plans]
    reasons = {kind: dict(ledger[kind]) for kind in REASONED}
    resolved = ledger["trained"] + sum(sum(each.values()) for each in reasons.values())
    lengths = _lengths(directory / "lengths")
    untrained = sorted(set(range(ledger["issued"])) - in_checkpoint)
    # What was under way when the run ended was not passed over. Where nothing else was dropped that is all of it.
    passed_over = set(untrained[: len(untrained) - reasons["dropped"].get(ENDED, 0)])
    deciles = deciles_of(lengths, issued=in_checkpoint | passed_over, trained=in_checkpoint, rows=rows)
    return Account(
        steps=steps,
        issued=ledger["issued"],
        trained=ledger["trained"],
        lost=ledger["issued"] - resolved,
        trained_twice=sum(count - 1 for count in lineage.values()),
        is_lineage_checkpoint=is_counted and in_checkpoint == set(lineage) and len(in_checkpoint) == ledger["trained"],
        balanced=ledger["balanced"],
        reasons=reasons,
        over_max_lag_groups=sum(count for lag, count in lags if lag > max_lag),
        largest_lag=max((lag for lag, _ in lags), default=0),
        max_lag=max_lag,
        discarded_token_share=_characters(lengths, passed_over) / _characters(lengths, lengths),
        graded_again_share=1 - len(lengths) * spec.rollout.group_size / sum(map(len, lengths.values())),
        deciles=deciles,
        slowest_over_fastest=_share(deciles[-1]) / _share(deciles[0]) if deciles[0].trained else None,
    )


def newest_checkpoint(directory: Path) -> tuple[set[int], int, IntervalSet, Mapping[str, int]]:
    """Read the newest checkpoint of an experiment's directory.

    Returns:
        The groups that it lists as trained, its step, the numbers of versions that were lost on the way to it, and
        what it says of those that it lists whether they were trained or not.
    """
    newest = max((directory / "checkpoints").glob("step-*"))
    state = json.loads((newest / "state.json").read_text())
    trained = IntervalSet.from_list(state["trained"])
    closed = state.get("closed") or {"below": 0, "untrained": 0}
    return set(trained), int(state["step"]), IntervalSet.from_list(state.get("lost_versions", [])), closed


def lag_of(plan: Mapping[str, Any], lost_versions: Iterable[int]) -> int:
    """Count the versions between the oldest one that sampled a token of a step and the one that the step trains.

    A version that was lost has a number and no weights: none of the lineage was trained or sampled in between.
    """
    oldest, trained = plan["oldest_version"], plan["version"]
    return int(trained - oldest - sum(oldest < version <= trained for version in lost_versions))


async def _plan(client: GatewayClient, base: str, step: int) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = await client.call("GET", f"{base}/steps/{step}", deadline_seconds=30)
    except NotFound:
        # Its groups are then missing in the lineage, and the checkpoint is not the lineage.
        return None
    return found


def _lengths(notes: Path) -> dict[int, list[int]]:
    """Read the lengths that the grader noted, by group."""
    found: dict[int, list[int]] = defaultdict(list)
    for line in notes.read_text().splitlines():
        group_id, length = line.split()
        found[int(group_id)].append(int(length))
    return found


def deciles_of(
    lengths: Mapping[int, Sequence[int]], *, issued: set[int], trained: set[int], rows: int
) -> tuple[Decile, ...]:
    """Sort prompts by the mean length of their answers, and count for each tenth of them what was trained.

    Args:
        lengths: of the answers of each group that was graded.
        issued, trained: group ids.
        rows: prompts; group g answers prompt ``g mod rows``.
    """
    by_row: dict[int, list[int]] = defaultdict(list)
    for group_id, noted in lengths.items():
        by_row[group_id % rows].extend(noted)
    fastest_first = sorted(range(rows), key=lambda row: fmean(by_row[row] or [0]))
    found = []
    for number in range(DECILES):
        members = set(fastest_first[number * rows // DECILES : (number + 1) * rows // DECILES])
        of_members = {group_id for group_id in issued if group_id % rows in members}
        noted = [length for row in members for length in by_row[row]]
        found.append(Decile(round(fmean(noted or [0]), 1), len(of_members), len(of_members & trained)))
    return tuple(found)


def _characters(lengths: Mapping[int, Sequence[int]], group_ids: Iterable[int]) -> float:
    """Add up the answers of groups; one that was graded twice counts once."""
    return sum(fmean(lengths[group_id]) for group_id in group_ids if group_id in lengths)


def _share(decile: Decile) -> float:
    return decile.trained / max(1, decile.issued)
