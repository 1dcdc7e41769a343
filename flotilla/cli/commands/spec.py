"""``flotilla spec check | show | schema``: inspect a spec before anything runs. Needs neither torch nor a fleet."""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flotilla.cli.output import telling, write_json
from flotilla.launch_file import LaunchFile, read_launch_file
from flotilla.packages import check_packages, check_quantisation
from flotilla.server_arguments import ASKING_THE_ENGINE, check_options
from flotilla.shared.config.load.overrides import origin_of
from flotilla.shared.config.load.yaml_text import write_value
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidSpec, Scalar, Unavailable
from flotilla.sizing import available_here, size_up

if TYPE_CHECKING:
    from flotilla.services.gateway.preflight.inspection import Rows
    from flotilla.services.gateway.preflight.prompts import Prompts
    from flotilla.spec_trial import Trial

COLUMN = 56
SHOWN_CHARACTERS = 1500


async def check(arguments: argparse.Namespace) -> int:
    """Return whether the file is valid, and with ``--data`` what it names: one line per problem, exit 1."""
    entries: Sequence[Mapping[str, Scalar]] = ()
    lines: list[str] = []
    answer: dict[str, Any] = {}
    try:
        launch = _read(arguments.spec, arguments.set or ())
        async with telling(ASKING_THE_ENGINE):
            await check_options(launch.spec)
    except InvalidSpec as error:
        entries = error.errors or [{"path": "", "value": None, "allowed": error.detail}]
    else:
        if arguments.data:
            async with telling("opening the model and the data, and trying environments and graders"):
                found = await _tried(launch.spec)
            entries = (*found.errors, *_unpackable(launch.spec))
            answer["data"] = [asdict(rows) for rows in found.rows]
            answer["prompts"] = asdict(found.prompts) if found.prompts else None
            answer["tried"] = list(found.lines)
            lines += [_told(rows) for rows in found.rows]
            lines += _rendered(found.prompts, launch.spec.rollout.engine.context_tokens) if found.prompts else []
            lines += [f"{line}\n" for line in found.lines]
            lines += _unprepared(launch) if entries else []
        if not entries:
            sizing, available = await asyncio.to_thread(size_up, launch.spec), available_here()
            answer["memory"], answer["refusal"] = sizing.facts(), sizing.refusal(available)
            lines += [f"{line}\n" for line in sizing.lines(available)]
            lines.append(f"{arguments.spec} is valid: {launch.spec.name}, {launch.spec.optimisation.steps} steps\n")
    if arguments.json:
        write_json({"valid": not entries, "errors": [*entries], **answer})
    else:
        sys.stdout.writelines(lines)
        sys.stderr.writelines(f"{entry['path']}: {entry['allowed']}\n".removeprefix(": ") for entry in entries)
    return 1 if entries else 0


async def _tried(spec: ExperimentSpec) -> "Trial":
    # Here, since a spec is checked without it in a moment.
    from flotilla.spec_trial import try_out

    return await try_out(spec)


def _unpackable(spec: ExperimentSpec) -> list[dict[str, Scalar]]:
    """Report that a trainer on this machine could not pack the weights, where one could start at all."""
    with contextlib.suppress(Unavailable):
        check_packages()
        try:
            check_quantisation(spec)
        except InvalidSpec as error:
            return [{"path": "", "value": None, "allowed": error.detail}]
    return []


def _rendered(prompts: "Prompts", context_tokens: int) -> list[str]:
    """Describe the prompts, with the first one as the model is given it."""
    lines = [
        f"prompts: {prompts.shortest} to {prompts.longest} tokens (first {prompts.num_prompts} rows), "
        f"at most {prompts.limit} allowed; rendered by {prompts.rendered_by}\n"
    ]
    if prompts.own_context is not None and prompts.own_context < context_tokens:
        lines.append(
            f"context: {prompts.own_context} tokens, which the model itself can hold: the {context_tokens} of "
            "rollout.engine.context_tokens are cut to that\n"
        )
    if prompts.num_too_long:
        lines.append(f"prompts: {prompts.num_too_long} of them are too long: see data.overlong\n")
    shown = prompts.first[:SHOWN_CHARACTERS] + ("..." if len(prompts.first) > SHOWN_CHARACTERS else "")
    return [*lines, "first prompt, as the model is given it:\n", *(f"  | {line}\n" for line in shown.split("\n"))]


def _told(rows: "Rows") -> str:
    name = f" ({rows.name})" if rows.name else ""
    return f"{rows.field}{name}: {rows.num_rows} rows of {rows.place}; columns {', '.join(rows.columns)}\n"


def _unprepared(launch: LaunchFile) -> list[str]:
    """Warn that something may be missing because it was not created yet."""
    if launch.prepare is None or (launch.path.parent / launch.prepare.output).exists():
        return []
    command = " ".join(launch.prepare.command)
    return [f"prepare has not made {launch.prepare.output} yet: flotilla run does it first, as {command!r}\n"]


async def show(arguments: argparse.Namespace) -> int:
    """Print the resolved spec: valid YAML, with the origin of each value as a comment."""
    overrides = arguments.set or ()
    resolved, rows = _resolved(arguments.spec, overrides)
    if arguments.json:
        found = [{"path": path, "value": value, "origin": origin} for path, value, origin in rows]
        write_json(found)
    else:
        origins = {path: origin for path, _, origin in rows}
        sys.stdout.writelines(_lines(resolved, "", 0, origins))
    return 0


def _resolved(path: str, overrides: Sequence[str]) -> tuple[dict[str, Any], list[tuple[str, Any, str]]]:
    launch = _read(path, overrides)
    resolved = launch.spec.model_dump(mode="json")
    leaves = _leaves(resolved)
    return resolved, [
        (".".join(parts), value, origin_of(parts, launch.written, launch.overrides)) for parts, value in leaves
    ]


async def schema(arguments: argparse.Namespace) -> int:
    """Print the JSON Schema."""
    write_json(ExperimentSpec.model_json_schema())
    return 0


def _read(path: str, overrides: Sequence[str]) -> LaunchFile:
    return read_launch_file(Path(path), overrides, os.environ)


def _leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _leaves(value, (*path, str(key)))
    elif isinstance(node, list) and any(isinstance(item, Mapping) for item in node):
        for index, value in enumerate(node):
            yield from _leaves(value, (*path, str(index)))
    else:
        yield path, node


def _lines(node: Mapping[str, Any], path: str, depth: int, origins: Mapping[str, str], mark: str = "") -> list[str]:
    lines: list[str] = []
    for key, value in node.items():
        indent = "  " * depth if not mark or lines else "  " * (depth - 1) + mark
        inner = f"{path}.{key}" if path else key
        if isinstance(value, Mapping) and value:
            lines += [f"{indent}{key}:\n", *_lines(value, inner, depth + 1, origins)]
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            lines.append(f"{indent}{key}:\n")
            for index, item in enumerate(value):
                lines += _lines(item, f"{inner}.{index}", depth + 2, origins, mark="- ")
        else:
            lines.append(f"{f'{indent}{key}: {_scalar(value)}':<{COLUMN}}  # {origins[inner]}\n")
    return lines


def _scalar(value: Any) -> str:
    text = write_value(value, flow=True, width=10**6)
    return text.removesuffix("\n...\n").removesuffix("\n")
