"""Writes the page about a survival run."""

import os
import platform
from collections.abc import Mapping
from typing import Any

HEAD = """# Survival

Faults chosen at random under a running experiment with stale samples (staleness threshold 0.5, `pace`, a publication
after every step), on a fleet on one machine with a Redis server of its own (append-only file, `everysec`): processes
are killed and paused, the power is cut with and without the end of the server's log, the disk fills up, weight images
and checkpoints are deleted or spoiled, clocks jump, packets are dropped (`tests/survival/faults.py`).

    python -m tests.survival --faults {faults} --seed {seed} --report docs/survival.md

made this page on {cores} cores, {system}, Python {python}. After each fault the ledger is read and the next step is
awaited; the ledger is also read all the while. At the end the experiment is stopped, and each group that was ever
issued is looked for: in the last checkpoint, in the lineage, among those that ended with a reason. No kind of process
is killed more than three times in 35 s, since a fleet gives up a process that dies five times in 30 s.
"""
DECILES_TEXT = """
## Slow prompts

The lengths of the answers are random, and their mean is a matter of the prompt: prompts are sorted by the measured mean
into tenths. Every prompt is issued equally often, and what counts is how many of the groups issued were trained. These
are counts, not estimates: the only groups left out are those under way when the run was stopped (`experiment_ended`).
"""


def markdown(faulty: Mapping[str, Any], quiet: Mapping[str, Any]) -> str:
    """Write the page.

    Args:
        faulty: figures of the run with faults.
        quiet: figures of the run without.
    """
    head = HEAD.format(
        faults=faulty["faults"],
        seed=faulty["seed"],
        cores=os.cpu_count(),
        system=platform.system(),
        python=platform.python_version(),
    )
    return "\n".join([head, _figures(faulty, quiet), _recovery(faulty), DECILES_TEXT, _deciles(faulty, quiet), ""])


def _figures(faulty: Mapping[str, Any], quiet: Mapping[str, Any]) -> str:
    rows = [
        ("faults", "faults"),
        ("seconds", "seconds"),
        ("steps", "steps"),
        ("groups issued", "issued"),
        ("groups trained", "trained"),
        ("**groups lost**", "lost"),
        ("**groups trained twice**", "trained_twice"),
        ("lineage and checkpoint hold the same groups", "is_lineage_checkpoint"),
        ("ledgers read", "ledger_looks"),
        ("**ledgers that did not balance**", "unbalanced"),
        ("groups that ended otherwise, with reason", "reasons"),
        ("largest lag of a trained token, in versions", "largest_lag"),
        ("allowed (`max_lag`)", "max_lag"),
        ("**groups trained with a token over `max_lag`**", "over_max_lag_groups"),
        ("tokens of graded groups that were never trained", "discarded_token_share"),
        ("answers graded once more, as their holder died", "graded_again_share"),
        ("trained share, slowest tenth of prompts over fastest", "slowest_over_fastest"),
    ]
    lines = ["| | with faults | without |", "| --- | --- | --- |"]
    lines += [f"| {title} | {_shown(name, faulty[name])} | {_shown(name, quiet[name])} |" for title, name in rows]
    return "\n".join(lines)


def _shown(name: str, value: Any) -> str:
    if name == "unbalanced":
        return str(len(value))
    if name == "reasons":
        found = [f"{kind}: {reason} {n}" for kind, reasons in value.items() for reason, n in reasons.items()]
        return ", ".join(found) or "none"
    if name.endswith("_share"):
        return f"{value:.2%}"
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if value is None:
        return "-"
    return f"{value:.3f}" if name == "slowest_over_fastest" else str(value)


def _recovery(faulty: Mapping[str, Any]) -> str:
    lines = [
        "\n## Recovery",
        "",
        "Seconds from the end of a fault to the next step done (a trainer that died first repeats steps).",
        "",
    ]
    lines += ["| fault | times | median | longest |", "| --- | --- | --- | --- |"]
    for kind, count in faulty["faults_by_kind"].items():
        seconds = faulty["recovery_seconds"][kind]
        lines.append(f"| {kind} | {count} | {seconds['median']} | {seconds['max']} |")
    return "\n".join(lines)


def _deciles(faulty: Mapping[str, Any], quiet: Mapping[str, Any]) -> str:
    lines = ["| tenth | mean characters | trained of issued, with faults | mean characters | without |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for number, (one, other) in enumerate(zip(faulty["deciles"], quiet["deciles"], strict=True), start=1):
        lines.append(
            f"| {number} | {one['mean_length']} | {one['trained']} of {one['issued']} "
            f"| {other['mean_length']} | {other['trained']} of {other['issued']} |"
        )
    return "\n".join(lines)
