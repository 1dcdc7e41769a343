"""What is kept of trained models on disk: saved ones, which clients name, and the present state of each.

Both are complete or not there: written under another name, flushed, then renamed. What a full disk refuses leaves
nothing there, and takes nothing of the model in memory.

What each owner's saved models and states take of the disk is counted.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flotilla.services.trainer.tinker.slots import ALPHA, A, B, Slot
from flotilla.shared.errors import FlotillaError, ModelError, NotFound, QuotaExceeded
from flotilla.shared.files.durable import flush
from flotilla.shared.models.hub import ADAPTER, ADAPTER_CONFIG
from flotilla.shared.tinker.locks import UNFINISHED, changing
from flotilla.shared.tinker.paths import FOLDER
from flotilla.shared.tinker.records import MANIFEST, Record, Saved

WHOLE, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
WEIGHTS, GRADIENTS = "weights.safetensors", "gradients.safetensors"
PEFT = {A: "lora_A", B: "lora_B"}
PREFIX = "base_model.model."
UNFINISHED_SECONDS = 24 * 3600


class NotWritten(FlotillaError):
    """The disk refuses: mostly it is full."""

    code, title, status = "not_written", "The disk refuses", 507


class Progress(Record):
    """A state on disk: its last request, updates since the model was made, whose it is, and its size."""

    seq: int
    step: int
    owner: str = ""
    num_bytes: int = 0


def save(directory: Path, slot: Slot, base: str, saved: Saved) -> Saved:
    """Write a saved model; an older one of the name is replaced. Returns what it is, with its size.

    Raises:
        NotWritten: the disk refuses; an older one of the name is still there.
    """
    with _begun(directory) as unfinished:
        found = _write_saved(unfinished, slot, base, saved)
        with changing(directory.parents[2]):
            if _seq_of(directory) > saved.seq:
                # A process that was replaced is late: what its successor wrote since stays.
                return found
            replaced = _put(unfinished, directory)
    # Gigabytes, but nothing else waits for it.
    shutil.rmtree(replaced, ignore_errors=True)
    return found


def _write_saved(unfinished: Path, slot: Slot, base: str, saved: Saved) -> Saved:
    weights = slot.weights()
    if slot.lora is None:
        save_file(_on_host(weights), unfinished / WHOLE)
    else:
        save_file(_on_host({_peft(name): each for name, each in weights.items()}), unfinished / ADAPTER)
        (unfinished / ADAPTER_CONFIG).write_text(json.dumps(_peft_config(slot, base)), encoding="utf-8")
    if saved.has_optimizer:
        save_file(_on_host(slot.moments()), unfinished / OPTIMIZER)
    size = sum(each.stat().st_size for each in unfinished.iterdir())
    found = saved.model_copy(update={"num_bytes": size, "step": slot.step})
    (unfinished / MANIFEST).write_text(found.model_dump_json(), encoding="utf-8")
    _flush(unfinished)
    return found


def _seq_of(directory: Path) -> int:
    try:
        return read_saved(directory).seq
    except NotFound:
        return -1


def read_saved(directory: Path) -> Saved:
    """Read what a saved model is.

    Raises:
        NotFound: it is not there.
    """
    try:
        return Saved.model_validate_json((directory / MANIFEST).read_bytes())
    except (OSError, ValidationError):
        raise NotFound(f"{directory.name}: there is no saved model of this name, or it was deleted") from None


def load_saved(directory: Path, slot: Slot, *, with_optimizer: bool) -> None:
    """Take weights, and the optimiser's state if wanted, of a saved model.

    Raises:
        ModelError: they cannot be read, or are of another model.
    """
    saved = read_saved(directory)
    if saved.lora is None:
        weights = _read(directory / WHOLE)
    else:
        weights = {_plain(name): each for name, each in _read(directory / ADAPTER).items()}
    slot.load(weights, _read(directory / OPTIMIZER) if with_optimizer and saved.has_optimizer else {})
    slot.step = saved.step


def keep_state(directory: Path, slot: Slot, seq: int, owner: str) -> None:
    """Write the present state, gradients that wait for an update included; the one before stays, older ones go.

    Where Redis comes back older than the newest state, the one before is gone on from.

    Raises:
        NotWritten: the disk refuses; the newest state is still there.
    """
    kept = directory / str(seq)
    with _begun(kept) as unfinished:
        save_file(_on_host(slot.weights()), unfinished / WEIGHTS)
        save_file(_on_host(slot.moments()), unfinished / OPTIMIZER)
        save_file(_on_host(slot.gradients()), unfinished / GRADIENTS)
        size = sum(each.stat().st_size for each in unfinished.iterdir())
        progress = Progress(seq=seq, step=slot.step, owner=owner, num_bytes=size)
        (unfinished / STATE).write_text(progress.model_dump_json(), encoding="utf-8")
        _flush(unfinished)
        shutil.rmtree(_put(unfinished, kept), ignore_errors=True)
    # Not newer ones: a process that was replaced may come here late.
    for older in sorted(each for each in _states(directory) if each < seq)[:-1]:
        shutil.rmtree(directory / str(older), ignore_errors=True)


def state_seq(directory: Path, before: int | None = None) -> int | None:
    """Return up to which request the newest state is, of those behind no request from ``before`` on; None: none is."""
    return max((each for each in _states(directory) if before is None or each < before), default=None)


def drop_states(directory: Path, first: int) -> None:
    """Remove states that have a request from ``first`` on: it is asked for again."""
    for later in _states(directory):
        if later >= first:
            shutil.rmtree(directory / str(later), ignore_errors=True)


def _states(directory: Path) -> list[int]:
    return [int(each.name) for each in directory.glob("*") if each.name.isdigit() and (each / STATE).is_file()]


def load_state(directory: Path, slot: Slot, seq: int) -> None:
    """Take the state behind a request.

    Raises:
        ModelError: it cannot be read.
    """
    kept = directory / str(seq)
    progress = Progress.model_validate_json((kept / STATE).read_bytes())
    slot.load(_read(kept / WEIGHTS), _read(kept / OPTIMIZER))
    slot.add_gradients(_read(kept / GRADIENTS))
    slot.step = progress.step


@contextmanager
def _begun(directory: Path) -> Iterator[Path]:
    try:
        # Of a process of its own: one that was replaced may still write. What it left there is older than a day then.
        directory.parent.mkdir(parents=True, exist_ok=True)
        for left in directory.parent.glob(f".*{UNFINISHED}"):
            with suppress(FileNotFoundError):
                if left.stat().st_mtime < time.time() - UNFINISHED_SECONDS:
                    shutil.rmtree(left, ignore_errors=True)
        unfinished = _aside(directory)
        try:
            yield unfinished
        finally:
            # It was renamed, unless something failed, such as a full disk: each try would take as much of it.
            shutil.rmtree(unfinished, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise NotWritten(f"{directory.name} was not written, and what was there before stays: {error}") from error


def _aside(directory: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=UNFINISHED, dir=directory.parent))


def _flush(unfinished: Path) -> None:
    for file in unfinished.iterdir():
        flush(file)
    flush(unfinished)


def _put(unfinished: Path, directory: Path) -> Path:
    """Rename a directory into its place; returns where the one lies that was there, which is to be removed."""
    replaced = _aside(directory)
    with suppress(FileNotFoundError):
        directory.rename(replaced)
    try:
        unfinished.rename(directory)
    except OSError:
        with suppress(OSError):
            replaced.rename(directory)
        raise
    flush(directory.parent)
    return replaced


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.detach().cpu().contiguous() for name, each in tensors.items()}


def _read(path: Path) -> dict[str, Tensor]:
    try:
        found: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path.name} of the saved model {path.parent.name} cannot be read: {error}") from error
    return found


def _peft(name: str) -> str:
    layer, _, part = name.rpartition(".")
    return f"{PREFIX}{layer}.{PEFT[part]}.weight"


def _plain(name: str) -> str:
    layer, _, part = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
    return f"{layer}.{A if part == PEFT[A] else B}"


def _peft_config(slot: Slot, base: str) -> Mapping[str, object]:
    assert slot.lora is not None
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": slot.lora.rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[0] for name in slot.parameters}),
    }


class Owned(Record):
    """The metadata of a manifest or a state."""

    owner: str = ""
    num_bytes: int = 0


class Usage:
    """Counts bytes. What is on the disk is what there is: only what was read before is remembered.

    Args:
        data: the fleet's directory.
        most_bytes: that one owner may have.
    """

    def __init__(self, data: Path, most_bytes: int) -> None:
        self._root, self._most = data / FOLDER, most_bytes
        self._read: dict[Path, tuple[int, Owned]] = {}

    def of(self, owner: str, states: Mapping[str, int]) -> int:
        """Return how many bytes an owner has, or will have.

        Args:
            owner: whose.
            states: by model of this owner's, what its states will take; fewer may be on the disk yet.
        """
        found = dict(self._every())
        self._read = found
        used, on_disk = 0, dict[str, list[int]]()
        for path, (_, each) in found.items():
            if each.owner != owner:
                continue
            if path.name == STATE:
                on_disk.setdefault(path.parent.parent.name, []).append(each.num_bytes)
            else:
                used += each.num_bytes
        # The state before the newest is kept: where there is one, there will be two.
        will = {model: max(sum(each), 2 * max(each)) for model, each in on_disk.items()}
        return used + sum(max(will.get(model, 0), states.get(model, 0)) for model in will.keys() | states.keys())

    def check(self, owner: str, states: Mapping[str, int], more: int = 0) -> None:
        """Refuse what an owner has no room for.

        Args:
            owner: whose.
            states: as ``of`` takes them.
            more: bytes beside these.

        Raises:
            QuotaExceeded: saying how much there is.
        """
        used = self.of(owner, states)
        if used + more > self._most:
            raise QuotaExceeded(
                f"this key's models have or need {used} bytes on the disk, and {more} more are over its {self._most}: "
                "delete saved ones, let them expire (ttl_seconds), or finish sessions"
            )

    def _every(self) -> Iterator[tuple[Path, tuple[int, Owned]]]:
        for pattern in (f"saved/*/*/[!.]*/{MANIFEST}", f"state/*/[!.]*/{STATE}"):
            for path in self._root.glob(pattern):
                try:
                    changed = path.stat().st_mtime_ns
                    known = self._read.get(path)
                    if known is None or known[0] != changed:
                        known = changed, Owned.model_validate_json(path.read_bytes())
                except (OSError, ValidationError):
                    continue  # it is being deleted
                yield path, known
