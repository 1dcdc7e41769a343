"""``flotilla extend | set | fork``: an experiment trains on, perhaps otherwise; or another one continues from it."""

import argparse
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from flotilla.cli.continuing import at_rest
from flotilla.cli.gateway import COPY_SECONDS, START_SECONDS, open_gateway
from flotilla.cli.output import new_console, write_json
from flotilla.client.asynchronous import AsyncClient
from flotilla.shared.config.load.live import by_number, differences
from flotilla.shared.config.load.overrides import Override, apply, on_command_line, with_origins
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.schemas.experiment import ExperimentView


async def extend(arguments: argparse.Namespace) -> int:
    """Raise the steps of an experiment; one that is ending is waited for, one that has ended continues."""
    async with open_gateway(arguments) as client:
        view = await at_rest(client, await client.experiment(arguments.experiment))
        now = await client.with_deadline(START_SECONDS).extend(view, arguments.steps)
    if arguments.json:
        write_json(now.model_dump(mode="json"))
        return 0
    new_console().print(
        f"{now.id} ({now.name}) is {now.state} at step {now.step} and trains to step {now.total_steps}; before, "
        f"{view.total_steps}"
    )
    return 0


async def change(arguments: argparse.Namespace) -> int:
    """Change settings of an experiment while it runs, and print from when on each applies."""
    layers = on_command_line(arguments.settings)
    async with open_gateway(arguments) as client:
        before = await client.experiment(arguments.experiment)
        wanted = apply(before.spec, layers)
        now = await client.change(before, **differences(before.spec, wanted))
    if arguments.json:
        write_json(now.model_dump(mode="json"))
        return 0
    known = {each.id for each in before.changes}
    console = new_console()
    for each in now.changes:
        if each.id not in known:
            since = "the next version that the trainer begins" if each.version is None else f"version {each.version}"
            for key in each.keys:
                console.print(
                    f"{now.id}: {key.path} is {key.after}, before {key.before}; from {since} on", soft_wrap=True
                )
    return 0


async def fork(arguments: argparse.Namespace) -> int:
    """Start an experiment from a checkpoint of another, with other settings where they are given."""
    async with open_gateway(arguments) as client:
        view = await fork_of(client, arguments, arguments.name)
    if arguments.json:
        write_json(view.model_dump(mode="json"))
        return 0
    assert view.origin is not None
    new_console().print(
        f"{view.id} ({view.name}) starts from step {view.origin.step} of {view.origin.experiment_id} and trains to "
        f"step {view.total_steps}; `flotilla watch {view.id}` follows it"
    )
    return 0


async def fork_of(client: AsyncClient, arguments: argparse.Namespace, name: str | None = None) -> ExperimentView:
    """Fork ``arguments.origin``, with its overrides, and return the new experiment.

    Raises:
        InvalidSpec: an override is wrong.
    """
    where, step = parse_reference(arguments.origin)
    parent = await client.experiment(where)
    given = {"seed": arguments.seed, "name": name}
    texts = [*(arguments.set or []), *(f"{key}={value}" for key, value in given.items() if value is not None)]
    layers = on_command_line(texts)
    try:
        wanted = validate_spec(apply(parent.spec, layers)).model_dump(mode="json")
    except InvalidSpec as error:
        raise with_origins(error, layers) from None
    # Not whole sections: what was changed after the checkpoint is in them.
    return await client.with_deadline(COPY_SECONDS).fork(parent, keys_of_fork(parent.spec, wanted, layers), step)


def keys_of_fork(present: Mapping[str, Any], wanted: Mapping[str, Any], layers: Sequence[Override]) -> dict[str, Any]:
    """List what a fork is sent: what differs from the parent, and whatever was named.

    The checkpoint may have had another value than the parent has now.
    """
    keys = deepcopy(dict(differences(present, wanted)))
    for layer in layers:
        here, value = keys, wanted
        for depth, part in enumerate(layer.path, 1):
            if part not in value:
                break
            value = by_number(value[part])
            if depth == len(layer.path) or not isinstance(value, Mapping):
                here[part] = deepcopy(value)
                break
            here = here.setdefault(part, {})
    return keys


def parse_reference(text: str) -> tuple[str, int | None]:
    """Split ``EXPERIMENT`` or ``EXPERIMENT@STEP``."""
    where, at, step = text.rpartition("@")
    return (where, int(step)) if at and step.isdigit() else (text, None)


async def absolute_reference(client: AsyncClient, reference: str) -> str:
    """Write a reference as a spec holds it: an id for what names an experiment, an absolute path for a path."""
    where, step = parse_reference(reference)
    at = "" if step is None else f"@{step}"
    if "/" in where:
        return f"{_absolute(where)}{at}"
    return f"{(await client.experiment(where)).id}{at}"


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()
