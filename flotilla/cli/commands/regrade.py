"""``flotilla regrade``: a run's samples under another grader, and the command that trains on with it."""

import argparse
import asyncio
import json
import os
import shlex
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flotilla.cli.commands.replay import directory_of
from flotilla.cli.commands.show import experiment_directory
from flotilla.cli.output import new_console, short_path, table_of, write_json
from flotilla.shared.checkpoints.folders import CHECKPOINTS, complete
from flotilla.shared.config.load.paths import resolve_paths
from flotilla.shared.config.load.spec_text import parse_document
from flotilla.shared.environment.settings import Secrets
from flotilla.shared.errors import InvalidRequest

if TYPE_CHECKING:
    from flotilla.regrading import Flips, Plan

SECTION = "reward"


async def regrade(arguments: argparse.Namespace) -> int:
    """Grade the samples again and print what would be other."""
    directory = experiment_directory(arguments) or await directory_of(arguments, "regrade it where its samples are")
    try:
        from flotilla.regrading import plan, regrade_run, secrets_asked_for
    except ModuleNotFoundError as error:
        raise InvalidRequest(f"regrading needs {error.name}: pip install 'flotilla[torch]'") from None
    output = None if arguments.output is None else Path(arguments.output)
    planned = await asyncio.to_thread(plan, directory, reward_section(Path(arguments.reward)), output)
    secrets = _secrets(secrets_asked_for(planned.spec), arguments.secret, arguments.reward)
    flips = await regrade_run(planned, _tell, secrets)
    fork = fork_command(planned, flips)
    if arguments.json:
        write_json({"experiment": directory.name, "output": str(planned.output), "fork": fork, **flips.document()})
    else:
        _print(planned, flips, fork)
    return 0


def reward_section(path: Path) -> Mapping[str, Any]:
    """Read a reward section: a file that is one, or a spec that has one.

    Raises:
        InvalidSpec: it is neither.
    """
    document = parse_document(path.read_text(encoding="utf-8"), source=str(path))
    section = document.get(SECTION, document)
    if not isinstance(section, dict) or "components" not in section:
        raise InvalidRequest(f"{path} is neither a reward section (components: ...) nor a spec with one (reward: ...)")
    resolved: Mapping[str, Any] = resolve_paths({SECTION: section}, path.absolute().parent)[SECTION]
    return resolved


def _secrets(asked: Collection[str], allowed: Collection[str], source: str) -> Mapping[str, str]:
    """Read the environment variables that graders may use: those that were named for it, and no others.

    Raises:
        InvalidRequest: the section asks for another one, or one is not set.
    """
    if others := sorted(set(asked) - set(allowed)):
        options = " ".join(f"--secret {shlex.quote(name)}" for name in others)
        raise InvalidRequest(
            f"{source} asks for environment variables, whose values its servers could come to know: "
            f"{', '.join(map(repr, others))}; {options} lets it"
        )
    found, values = {}, Secrets(os.environ)
    for name in asked:
        if name not in values:
            raise InvalidRequest(f"the environment variable {name!r} is not set")
        found[name] = values[name]
    return found


def _tell(done: int, of: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\rgraded {done} of {of} files of samples" + ("\n" if done == of else ""))
        sys.stderr.flush()


def fork_command(planned: "Plan", flips: "Flips") -> str | None:
    """Write the command that trains on with the new grader from before the first step that it changes."""
    if flips.first_step is None:
        return None
    steps = [each.step for each in complete(planned.directory / CHECKPOINTS) if each.step < flips.first_step]
    if not steps:
        return None
    section = json.dumps(planned.spec.reward.model_dump(mode="json", exclude_defaults=True), separators=(",", ":"))
    source = shlex.quote(f"{planned.directory.name}@{max(steps)}")
    return f"flotilla fork {source} --set {shlex.quote(f'{SECTION}={section}')}"


def _print(planned: "Plan", flips: "Flips", fork: str | None) -> None:
    console, counts = new_console(), flips.counts
    console.print("{}: {samples} samples of {groups} groups graded again".format(planned.directory.name, **counts))
    told = {
        "rewards": "of {samples} samples; {higher} higher than before",
        "filters": "of {groups} groups end otherwise",
        "advantages": "of {advantages_compared} members that were trained and would be; {signs} change sign",
    }
    rows = [(name, str(counts[name]), text.format(**counts)) for name, text in told.items()]
    console.print(table_of(("would be other", "count", ""), rows))
    if hidden := counts["groups_without_masks"]:
        console.print(f"{hidden} groups left out: sample_mask hid which tokens were sampled")
    if planned.why_no_advantages is not None:
        console.print(f"no advantages: {planned.why_no_advantages}", markup=False)
    if flips.outcomes:
        cells = [(was, now, str(count)) for (was, now), count in flips.outcomes.most_common()]
        console.print(table_of(("before", "now", "groups"), cells))
    for each in flips.examples:
        label = "" if each.label is None else f", label {each.label!r}"
        why = "" if each.why is None else f" ({each.why})"
        rewards = f"{_number(each.before)} -> {_number(each.after)}"
        line = f"{each.group_id}.{each.member}: {rewards}{label}: {each.completion!r}{why}"
        console.print(line, markup=False)
    console.print(f"every group  {short_path(planned.output)}", markup=False)
    if flips.first_step is not None:
        advice = fork or "there is no checkpoint before it: run the spec with the new section from the start"
        console.print(f"first other  step {flips.first_step}; {advice}", markup=False)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
