"""Whether a server has in memory what it was given, by hashes that it makes of its own tensors.

It names them in its own way, and fuses some: what each holds is made of the tensors of the file that it loaded, whose
bytes were checked when they came. Which of its tensors can be proved so is determined with the weights that it began
with: one that it lays out otherwise is then excluded.
"""

import asyncio
import hashlib
import logging
import mmap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flotilla.services.rollout.engines.decoders.adapter_files import header_in
from flotilla.services.rollout.engines.servers.adapters import ServedAdapters
from flotilla.services.rollout.engines.servers.attaching import UNREADABLE
from flotilla.services.rollout.engines.servers.dialect import Caller, Prover
from flotilla.shared.errors import (
    DeadlineExceeded,
    FlotillaError,
    Unavailable,
    WeightsDiverged,
    WeightTransferFailed,
    WorkerDied,
)
from flotilla.shared.models.weight_files import safetensors_files, shapes_in
from flotilla.shared.schemas.publication import TensorSpec
from flotilla.shared.weights.image.adapters import names_of
from flotilla.shared.weights.image.layout import ImageLayout

log = logging.getLogger(__name__)

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Weights that servers make of several, one after the other, by a part of their names."""
RENAMED: tuple[tuple[str, str], ...] = (
    ("language_model.model.", "model.language_model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("visual.", "model.visual."),
    ("model.", "model.language_model."),
)
"""How names of parts of vision-language models begin at servers, and in the model's files."""
TIED = ("lm_head.weight", "embed_tokens.weight")
"""A head, and what it is where the model's files have none."""
MIN_DIGITS = 16
"""Of a hash that counts."""
MAX_UNANSWERED = 3
"""Times that a server may leave the question open before it serves unproved."""
WIRE_NAMES: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def parts_of(name: str, known: Collection[str]) -> tuple[str, ...]:
    """Name the checkpoint's tensors that one of a server's is made of; none where it is not known."""
    others = [to + name.removeprefix(begins) for begins, to in RENAMED if name.startswith(begins)]
    head, embedding = TIED
    if name.endswith(head):
        others += [f"{begins}{embedding}" for begins in ("model.", "model.language_model.")]
    for written in (name, *others):
        if written in known:
            return (written,)
        for fused, parts in FUSED.items():
            found = tuple(written.replace(f".{fused}.", f".{part}.") for part in parts)
            if f".{fused}." in written and all(each in known for each in found):
                return found
    return ()


def hashes_of(
    files: Collection[Path], names: Collection[str], dtype: str, *, signs_zeros: bool = True
) -> dict[str, str]:
    """Hash what a server holds that has loaded some files: SHA-256 by its names; blocks.

    Args:
        files: of safetensors.
        names: of the server's tensors; those that cannot be proved are left out.
        dtype: that it computes in; tensors of another are left out.
        signs_zeros: whether zeros keep their signs.

    Raises:
        WeightTransferFailed: a file cannot be read.
    """
    places: dict[str, tuple[mmap.mmap, TensorSpec]] = {}
    try:
        for path in files:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            places |= {spec.name: (mapped, spec) for spec in ImageLayout.parse(memoryview(mapped)).tensors}
    except OSError as error:
        raise WeightTransferFailed(f"weights cannot be read again: {error}") from error
    found = {}
    for name in names:
        parts = [places[each] for each in parts_of(name, places)]
        if parts and all(spec.dtype == WIRE_NAMES.get(dtype) for _, spec in parts):
            digest = hashlib.sha256()
            for mapped, spec in parts:
                part = memoryview(mapped)[spec.start : spec.end]
                digest.update(part if signs_zeros else _without_signs_of_zeros(part, dtype))
            found[name] = digest.hexdigest()
    return found


def adapter_hashes_of(file: Path, names: Collection[str], files: Collection[Path]) -> dict[str, str | None]:
    """Hash what a server holds that has loaded a file of adapters in float32; see ``Adapting.hashes``; blocks.

    Args:
        file: of the adapters.
        names: of the server's tensors that can be proved.
        files: of the weights that they are added to.

    Returns:
        By layer and part; None where nothing is added.

    Raises:
        WeightTransferFailed: a file cannot be read.
    """
    known = shapes_in([*files])
    try:
        image = file.read_bytes()
    except OSError as error:
        raise WeightTransferFailed(f"adapters cannot be read again: {error}") from error
    layout = ImageLayout.parse(image)
    header, specs = header_in(layout.metadata), {spec.name: spec for spec in layout.tensors}
    found: dict[str, str | None] = {}
    for name in names:
        for number, weight in enumerate(parts_of(name, known)):
            pair = [specs.get(each) for each in names_of(weight)]
            key = f"{name.removesuffix('.weight')}.{number}"
            found[key] = None
            if header is not None and (low := pair[0]) is not None and (high := pair[1]) is not None:
                rank = low.shape[0]
                # As the server has it from the folder: alpha divided by the rank.
                scale = np.float32(header.scale * rank / rank)
                parts = [_as_float32(image, low), _as_float32(image, high) * scale]
                if any(each.any() for each in parts):
                    found[key] = hashlib.sha256(b"".join((each + 0).tobytes() for each in parts)).hexdigest()
    return found


def _as_float32(image: bytes, spec: TensorSpec) -> npt.NDArray[np.float32]:
    part = memoryview(image)[spec.start : spec.end]
    if spec.dtype == "BF16":
        return (np.frombuffer(part, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(part, np.float16 if spec.dtype == "F16" else np.float32).astype(np.float32)


def _without_signs_of_zeros(part: memoryview, dtype: str) -> memoryview:
    words = np.frombuffer(part, np.uint32 if dtype == "float32" else np.uint16).copy()
    words[words == 1 << (8 * words.itemsize - 1)] = 0
    return words.data


class ServerProof:
    """Proves what one server loads.

    Args:
        prover: how it is asked.
        dtype: that it computes in.
        seconds: that it may take to answer.
    """

    def __init__(self, prover: Prover, dtype: str, seconds: float) -> None:
        self._prover, self._dtype, self._seconds = prover, dtype, seconds
        self._provable: frozenset[str] | None = None
        self._unanswered = 0

    @property
    def can_tell(self) -> bool:
        """Whether any of its tensors can be proved, by the initial weights."""
        return bool(self._provable)

    @property
    def can_tell_adapters(self) -> bool:
        """Whether adapters that are added to these can be proved, too."""
        return self.can_tell and self._dtype == "float32"

    async def learn(self, caller: Caller, model: Path) -> None:
        """Determine which of its tensors can be proved; once, while it serves the initial weights.

        A server that cannot be proved serves unproved, which is logged with the reason.

        Args:
            caller: of the server.
            model: directory of these weights.

        Raises:
            DeadlineExceeded, Unavailable: it gave no answer; it is to be asked again, ``MAX_UNANSWERED`` times at most.
            WorkerDied: it is dead.
        """
        if self._provable is not None:
            return
        try:
            held = await self._prover.hashes(caller, seconds=self._seconds)
            wanted = await asyncio.to_thread(self._wanted, safetensors_files(model), held)
            self._provable = frozenset(name for name, found in held.items() if _is(found, wanted.get(name)))
        except WorkerDied:
            raise
        except (DeadlineExceeded, Unavailable) as error:
            self._unanswered += 1
            if self._unanswered < MAX_UNANSWERED:
                raise
            self._give_up(error)
        except (*UNREADABLE, FlotillaError) as error:
            self._give_up(error)

    def _wanted(self, files: Collection[Path], names: Collection[str]) -> dict[str, str]:
        return hashes_of(files, names, self._dtype, signs_zeros=self._prover.signs_zeros)

    def _give_up(self, error: Exception) -> None:
        self._provable = frozenset()
        cause = error.detail if isinstance(error, FlotillaError) else repr(error)
        log.warning("what the server loads is not proved", extra={"cause": cause})

    async def check(self, caller: Caller, directory: Path, version: int) -> None:
        """Hold what it has in memory against what it was to load.

        Args:
            caller: of the server, which samples nothing meanwhile.
            directory: that it loaded.
            version: that it is.

        Raises:
            WeightsDiverged: it has something else; names the first tensor.
            WeightTransferFailed: the directory was removed.
            Refused, LookupError, TypeError, ValueError, AttributeError: it does not answer any more.
        """
        await self._check(caller, [directory / "model.safetensors"], version)

    async def check_adapters(self, caller: Caller, adapters: ServedAdapters, name: str, version: int) -> None:
        """Hold the weights that it has against the model's files, and the adapters that it loaded last against theirs.

        Args:
            caller: of the server, which may sample other adapters meanwhile.
            adapters: that it has.
            name: of those that it loaded last.
            version: that they are.

        Raises:
            As of ``check``.
        """
        files, file = adapters.files(name)
        await self._check(caller, files, version)
        wanted = await asyncio.to_thread(adapter_hashes_of, file, self._provable or (), files)
        _refuse(version, wanted, await adapters.held_by(caller))

    async def _check(self, caller: Caller, files: Sequence[Path], version: int) -> None:
        wanted, held = await asyncio.gather(
            asyncio.to_thread(self._wanted, files, self._provable or ()),
            self._prover.hashes(caller, seconds=self._seconds),
            return_exceptions=True,  # nothing is left asking a server that samples again
        )
        if isinstance(wanted, BaseException):
            raise wanted
        if isinstance(held, BaseException):
            raise held
        _refuse(version, wanted, held)


def _refuse(version: int, wanted: Mapping[str, str | None], held: Mapping[str, str]) -> None:
    wrong = sorted(n for n, each in wanted.items() if (n in held if each is None else not _is(held.get(n, ""), each)))
    if wrong:
        raise WeightsDiverged(
            f"version {version} as the server has it is not what was published: {len(wanted) - len(wrong)} of "
            f"{len(wanted)} tensors are right, the first that differs is {wrong[0]}"
        )


def _is(found: str, wanted: str | None) -> bool:
    """Whether a server's hash, which may be cut, is of what is wanted."""
    return wanted is not None and len(found) >= MIN_DIGITS and wanted.startswith(found)
