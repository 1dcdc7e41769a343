"""How a run continues: what may differ in its spec, what its state needs, and the command that does it again."""

import argparse
import asyncio
import json
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flotilla.cli.gateway import START_SECONDS
from flotilla.client.asynchronous import AsyncClient
from flotilla.shared.config.load.live import by_number, effect_of, undone
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import ActionNotAllowed, Conflict
from flotilla.shared.schemas.experiment import ExperimentKind, ExperimentState, ExperimentView
from flotilla.shared.schemas.live_changes import LiveChange

REST_SECONDS = 60.0
PAUSE_SECONDS = 0.2
COMMIT = re.compile(r"[0-9a-f]{40}")
LIVE = ("resources.", "optimisation.steps")
AUTO = ("parallelism.device", "rollout.engine.device", "model.dtype", "asynchrony.publication.lora")
MAX_NAMED = 5


def overrides_of(arguments: argparse.Namespace) -> list[str]:
    """List what the command line of a run, or of an evaluation, sets in its spec, weakest first."""
    given = {"seed": arguments.seed, "name": arguments.name}
    named = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    return [*(arguments.set or []), *named]


def continue_command(arguments: argparse.Namespace, *, name: str, default_name: str) -> str:
    """Write the command that continues with a run.

    Args:
        arguments: of the run.
        name: of its directory.
        default_name: that a run of this spec has.
    """
    words = ["flotilla", "run", arguments.spec, "--continue"]
    for each in arguments.set or []:
        words += ["--set", each]
    given = {
        "seed": arguments.seed,
        "seeds": arguments.seeds,
        "runs": arguments.runs if arguments.runs != "runs" else None,
        "name": name if name != default_name else None,
        "rollouts": arguments.rollouts,
        "trainers": arguments.trainers,
        "rewards": arguments.rewards,
        "sandboxes": arguments.sandboxes,
        "port": arguments.port or None,
        "redis-url": arguments.redis_url if arguments.redis_url != os.environ.get("FLOTILLA_REDIS_URL") else None,
    }
    for option, value in given.items():
        words += [f"--{option}", str(value)] if value is not None else []
    return shlex.join([*words, *(["--plain"] if arguments.plain else [])])


def differences(recorded: ExperimentSpec, wanted: ExperimentSpec) -> dict[str, tuple[Any, Any]]:
    """Find the keys in which two specs differ: dotted path -> both values."""
    before, after = (dict(_leaves(spec.model_dump(mode="json"))) for spec in (recorded, wanted))
    paths = sorted(before.keys() | after.keys())
    return {path: (before.get(path), after.get(path)) for path in paths if before.get(path) != after.get(path)}


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    node = by_number(node)
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, node


def check_same(recorded: ExperimentSpec, wanted: ExperimentSpec, changes: Sequence[LiveChange] = ()) -> list[str]:
    """Refuse to continue under another spec, but for what an experiment may change.

    Args:
        recorded: as it is now.
        wanted: as the file has it: from before what was changed while the experiment ran, or from after.
        changes: that led to ``recorded``, oldest first.

    Returns:
        A line for each key that was changed and has its former value in the file.

    Raises:
        Conflict: a key differs; the detail names it with both values and the ways out.
    """
    former = validate_spec(undone(recorded.model_dump(mode="json"), changes))
    since = {key.path: change.version for change in changes for key in change.keys}
    present = differences(recorded, wanted)
    others = {path: pair for path, pair in present.items() if not path.startswith(LIVE)}
    before = differences(former, wanted)
    kept = [path for path in others if path in since and path not in before]
    lines = []
    for path in kept:
        is_, was = others.pop(path)
        held = "the next version" if since[path] is None else f"version {since[path]}"
        lines.append(f"{path} was changed while it ran and stays {is_!r} from {held} on; the spec has {was!r}")
    # Its directory identifies the run, and may have a number behind the name; the experiment keeps its own.
    others.pop("name", None)
    for path in [path for path in AUTO if others.get(path, ("", ""))[1] == "auto"]:
        # What it was decided to be when the run began stays.
        del others[path]
    if wanted.model.is_hub_name and not COMMIT.fullmatch(wanted.model.revision or ""):
        # A branch or tag, or none: the commit that it was when the run began stays.
        others.pop("model.revision", None)
    if others:
        named = "; ".join(f"{path} was {was!r}, is {now!r}" for path, (was, now) in list(others.items())[:MAX_NAMED])
        more = f"; and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
        live = (
            "; a running experiment takes it: flotilla set EXPERIMENT KEY=VALUE"
            if any(effect_of(path) is not None for path in others)
            else ""
        )
        raise Conflict(
            f"the run was started with another spec: {named}{more}{live}. Set it back to go on, or begin another "
            "run from this one's checkpoint: --name NAME --set checkpoint.resume_from=RUN_DIRECTORY"
        )
    return lines


async def go_on(
    client: AsyncClient, experiment_id: str | None, wanted: ExperimentSpec, say: Callable[[str], None]
) -> ExperimentView | None:
    """Let the experiment of a run continue, in whatever state it is; None if it was never created.

    Args:
        experiment_id: as the run recorded it; None: the oldest of its fleet.
        wanted: the spec as it is now: it may have more steps, and other quotas.

    Raises:
        Conflict: the spec differs in something else.
        ActionNotAllowed: it did not come to rest in time, or its checkpoints are gone.
    """
    views = [each for each in await client.experiments() if each.kind is ExperimentKind.SPEC]
    found = [each for each in views if experiment_id in {each.id, None}]
    if not found:
        return None
    view = await at_rest(client, found[0])
    client = client.with_deadline(START_SECONDS)
    recorded = validate_spec(view.spec)
    for line in check_same(recorded, wanted, view.changes):
        say(line)
    if wanted.resources != recorded.resources and not view.state.is_final:
        await client.change(view, wanted.resources.model_dump(mode="json"))
    steps, known = wanted.optimisation.steps, recorded.optimisation.steps
    if steps > known:
        say(f"{view.id} is extended from {known} to {steps} steps")
        return await client.extend(view, steps)
    if steps < known:
        say(f"{view.id} keeps its {known} steps; the spec has {steps}")
    if view.state is ExperimentState.DRAFT:
        return await client.start(view)
    if view.state in {ExperimentState.PAUSED, ExperimentState.STOPPED, ExperimentState.FAILED}:
        return await client.resume(view)
    return view


async def at_rest(client: AsyncClient, view: ExperimentView) -> ExperimentView:
    """Wait for the end of an experiment that is ending: its last ledger is written, and it can begin again.

    Raises:
        ActionNotAllowed: it did not come to rest in time.
    """
    end = time.monotonic() + REST_SECONDS
    while True:
        is_resting = view.state is not ExperimentState.STOPPING
        if is_resting and view.state is ExperimentState.FAILED:
            ledger = (await client.ledger(view)).train
            is_resting = not ledger.outstanding and not ledger.planned
        if is_resting:
            return view
        if time.monotonic() > end:
            raise ActionNotAllowed(f"{view.id} is {view.state} and did not come to rest within {REST_SECONDS:.0f} s")
        await asyncio.sleep(PAUSE_SECONDS)
        view = await client.experiment(view)
