"""``flotilla receipt``: a signed record of what a checkpoint was trained on, and its check."""

import argparse
import asyncio
import os
from pathlib import Path

from flotilla.cli.commands.show import newest_below
from flotilla.cli.exit_codes import ExitCode
from flotilla.cli.output import new_console, short_path, telling, write_json
from flotilla.receipts import FOLDER, KEY_FILE, Head, make_key, own_key, verify, write
from flotilla.shared.checkpoints.folders import CHECKPOINTS, StoredCheckpoint, complete, step_of
from flotilla.shared.errors import InvalidRequest, NotFound


async def receipt(arguments: argparse.Namespace) -> int:
    """Write a receipt, or check one; 1 if something is not as it was."""
    if arguments.verify is not None:
        return await _verify(arguments)
    if arguments.checkpoint is None:
        raise InvalidRequest("name a checkpoint's folder or a run, or --verify FILE")
    stored = await asyncio.to_thread(stored_checkpoint, Path(arguments.checkpoint))
    directory = stored.path.parent.parent
    output = Path(arguments.output) if arguments.output else directory / FOLDER / f"{stored.path.name}.jsonl"
    key = Path(arguments.key) if arguments.key else own_key(os.environ)
    if not arguments.key:
        await asyncio.to_thread(make_key, key)
    async with telling("reading checkpoint and samples"):
        head = await asyncio.to_thread(write, stored, output, key)
    if arguments.json:
        write_json({"receipt": str(output), "key": str(key), **_facts(head), "problems": []})
    else:
        console = new_console()
        console.print(f"{short_path(output)}: step {head.step} of {head.experiment_id}, {_extent(head)}", markup=False)
        beside = directory.parent.parent / KEY_FILE
        if not arguments.key and beside.exists():
            console.print(
                f"{short_path(beside)} is not used, since it may have come with the run: name yours by --key",
                markup=False,
            )
        console.print(f"signed by {short_path(key)}; check it by `flotilla receipt --verify {short_path(output)}`")
    return ExitCode.DONE


async def _verify(arguments: argparse.Namespace) -> int:
    file, problems = Path(arguments.verify), list[str]()
    where = checkpoint_of(file) if arguments.checkpoint is None else Path(arguments.checkpoint)
    stored = await asyncio.to_thread(stored_checkpoint, where)
    async with telling("reading checkpoint and samples"):
        checked = await asyncio.to_thread(verify, file, stored, problems.append)
    head = checked.head
    expected = await asyncio.to_thread(_public_key, arguments.key) if arguments.key else head.public_key
    if expected.strip() != head.public_key.strip():
        problems.append(f"key: the receipt is not signed by {arguments.key}")
    if arguments.json:
        counts = {"files": checked.files, "samples": checked.samples, "groups": checked.groups}
        graders = sorted(head.graders)
        write_json(
            {"receipt": str(file), **_facts(head), "checked": counts | {"graders": graders}, "problems": problems}
        )
    else:
        console = new_console()
        for problem in problems:
            console.print(problem, markup=False)
        verdict = f"{len(problems)} things are not as they were" if problems else "all is as it was"
        console.print(f"step {head.step} of {head.experiment_id}, {_extent(head)}: {verdict}", markup=False)
        if not arguments.key:
            console.print(f"signed by the key (compare it, or name it by --key):\n{head.public_key.strip()}")
    return ExitCode.FAILED if problems else ExitCode.DONE


def checkpoint_of(receipt: Path) -> Path:
    """Find the checkpoint of a receipt that is where it was written.

    Raises:
        InvalidRequest: it is elsewhere.
    """
    whole = receipt.absolute()
    if whole.parent.name != FOLDER:
        raise InvalidRequest(f"{receipt} is not in its run's folder {FOLDER}: name the checkpoint's folder, too")
    return whole.parent.parent / CHECKPOINTS / whole.stem


def _public_key(path: str) -> str:
    return Path(path).read_text(encoding="ascii")


def stored_checkpoint(path: Path) -> StoredCheckpoint:
    """Find a checkpoint by its folder, or the newest of a run.

    Raises:
        NotFound: there is no complete one.
    """
    step = step_of(path.name)
    directory = path.absolute().parent.parent if step is not None else newest_below(path, None)
    for stored in complete(directory / CHECKPOINTS, only=step):
        return stored
    raise NotFound(f"{path} has no complete checkpoint" if step is None else f"{path} is no complete checkpoint")


def _extent(head: Head) -> str:
    missing = f"; {len(head.missing_steps)} steps without whole samples" if head.missing_steps else ""
    return f"{head.num_groups} groups{missing}"


def _facts(head: Head) -> dict[str, object]:
    return {
        "experiment": head.experiment_id,
        "step": head.step,
        "missing_steps": list(head.missing_steps),
        "public_key": head.public_key.strip(),
    }
