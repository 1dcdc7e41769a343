"""What becomes of every parameter in lists of them: JSON files with ``system`` and ``parameters: [{name}]``.

Metrics that users of other systems look for by name are listed beside them.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla.importers.openrlhf.finished import FINISHED
from flotilla.importers.parameter import Parameter, Verdict
from flotilla.importers.systems import SYSTEMS
from flotilla.importers.verl.finished import VERL_SFT
from flotilla.importers.verl.written import VERL_EVAL
from flotilla.shared.errors import InvalidSpec

RECORDED = {
    "trainer/idle_ratio": "share of the time that the trainer waited for groups, per version",
    "rollouter/idle_ratio": "share of the time that the rollouts sampled nothing, per version",
    "fully_async/count/stale_samples_processed": "groups trained with a token of an older version, so far",
    "fully_async/count/stale_trajectory_processed": "trajectories trained with a token of an older version, so far",
    "fully_async/partial/total_partial_num": "trajectories of the step that span versions",
    "fully_async/partial/partial_ratio": "their share",
    "fully_async/partial/max_partial_span": "most versions that one spans",
}

METRICS: tuple[Parameter, ...] = (
    *(
        Parameter(name=name, verdict=Verdict.APPLIED, reason=f"recorded: {reason}", targets=(f"metric {name}",))
        for name, reason in RECORDED.items()
    ),
)  # fmt: skip


UNACCOUNTED = "unaccounted"
INTERNAL = (
    "ray_init", "trainer.ray_", "megatron.", "trainer.controller_nsight", "trainer.worker_nsight", "USE_MBRIDGE",
    "USE_DIST_CKPT", "strategy_config.", "actor_train.strategy_args", "actor_infer.strategy_args",
    "reference.strategy_args", "strategy_args", "rpc_timeout", "local_rank", "num_nodes", "num_gpus_per_node",
    "--actor_num", "--critic_num", "--ref_num", "--reward_num", "--colocate",
)  # fmt: skip
"""Names of schedulers, Ray and Megatron: where and on what a run is placed."""
VERL_OWN = {"sft.": VERL_SFT, "evaluation.": VERL_EVAL}
"""verl's programs with tables of their own, by what their names begin with in the lists."""
SFT_ALONE = frozenset({"--output_key"})
"""What of OpenRLHF's programs in the lists train_sft alone takes: train_ppo_ray knows no such flag."""


@dataclass(frozen=True, slots=True)
class Covered:
    """What becomes of one name.

    Attributes:
        file: the list that it stands in.
        name: as it is written there.
        verdict: a verdict's name, or ``unaccounted``.
        targets: the spec fields that it sets.
        reason: one line.
    """

    file: str
    name: str
    verdict: str
    targets: tuple[str, ...]
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "file": self.file,
            "name": self.name,
            "verdict": self.verdict,
            "targets": list(self.targets),
            "reason": self.reason,
        }


def coverage(directory: Path) -> list[Covered]:
    """Look up every name of every list in a directory.

    Raises:
        InvalidSpec: there is no list, or one cannot be read.
    """
    paths = sorted(directory.glob("*.json"))
    if not paths:
        raise InvalidSpec(f"{directory} holds no list of parameters (*.json)")
    return [covered for path in paths for covered in _covered(path)]


def _covered(path: Path) -> Iterable[Covered]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        system, names = str(document["system"]), [str(item["name"]) for item in document["parameters"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidSpec(f"{path} is no list of parameters: {type(error).__name__}: {error}") from None
    for name in names:
        row = find(system, name)
        if row is None:
            yield Covered(path.name, name, UNACCOUNTED, (), f"not in the tables of {system}")
        else:
            yield Covered(path.name, name, row.verdict.value, row.targets, row.reason)


def find(system: str, name: str) -> Parameter | None:
    """Find the row of a name, or of a metric; ``system`` is as the list says, such as ``verl launch script``."""
    metric = next((row for row in METRICS if row.name == name), None)
    known = SYSTEMS.get(system.split(maxsplit=1)[0].lower()) if system.strip() else None
    if known is not None and known.name == "openrlhf" and name in SFT_ALONE:
        known = FINISHED["openrlhf.cli.train_sft"]
    if known is not None and known.name == "verl":
        known = next((own for prefix, own in VERL_OWN.items() if name.startswith(prefix)), known)
    return metric if metric is not None or known is None else known.find(name)


def counts(rows: Sequence[Covered]) -> dict[str, dict[str, int]]:
    """Count verdicts by file."""
    files = dict.fromkeys(row.file for row in rows)
    found = {file: Counter(row.verdict for row in rows if row.file == file) for file in files}
    return {file: {name: found[file][name] for name in (*Verdict, UNACCOUNTED)} for file in files}


def refused_share(rows: Sequence[Covered]) -> tuple[int, int]:
    """Count the distinct names that are refused, and all of them, without those of schedulers, Ray and Megatron."""
    names = {row.name: row.verdict for row in rows if not row.name.startswith(INTERNAL)}
    return sum(verdict == Verdict.REFUSED for verdict in names.values()), len(names)
