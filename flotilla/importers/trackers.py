"""Trackers of metrics, which all three systems have under other names. Where a launch file is silent, none is fed.

What a system would feed by itself is left out: a tracker does not change what is trained, and needs accounts and
packages where the gateway runs.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flotilla.importers.source import Source

KINDS: Mapping[str, str | None] = {
    "wandb": "wandb", "mlflow": "mlflow", "tensorboard": "tensorboard", "file": "jsonl", "trackio": "trackio",
    "swanlab": "swanlab",
    "console": None, "stdout": None,
}  # fmt: skip
"""What a name means here; None: flotilla watch shows it."""
KEY = "the account's key is not part of a spec: set WANDB_API_KEY, or SWANLAB_API_KEY, where the gateway runs"


def swanlab_project(name: str) -> str:
    """Replace what SwanLab refuses in a project's name."""
    return re.sub(r"[^0-9a-zA-Z_\-+.]", "_", name)[:100]


def chosen(source: Source, parameter: str, written: Sequence[str], **options: Mapping[str, Any]) -> dict[str, Any]:
    """Make the trackers that a list of names asks for; one that is not offered is called unsupported.

    Args:
        parameter: that the list was written to.
        options: further fields by our kind.
    """
    kinds: list[str] = []
    for name in written:
        if name not in KINDS:
            why = f"{name} is none of the trackers here, which are {', '.join(sorted(KINDS))}: the run is shown by them"
            source.put_aside(source.given[parameter].spelling, why)
            continue
        kind = KINDS[name]
        if kind is not None and kind not in kinds:
            kinds.append(kind)
    return {"tracking.trackers": [{"kind": kind, **options.get(kind, {})} for kind in kinds]} if kinds else {}
