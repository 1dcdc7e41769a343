"""Weights of a model's directory, of which each rank reads the elements that it keeps.

The model is made without memory for its parameters, divided, and only then given memory: for a rank's own part. Every
tensor is mapped while it is copied from and no longer, so what a rank takes at most is its part and what it touches of
one tensor.
"""

import json
import logging
import mmap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from flotilla.services.trainer.weights.named_weights import distinct
from flotilla.services.trainer.weights.parts import index_of, local_of, localized
from flotilla.shared.errors import WeightTransferFailed
from flotilla.shared.schemas.publication import TensorSpec
from flotilla.shared.weights.image.checkpoint_names import Piece, pieces_of
from flotilla.shared.weights.image.layout import LENGTH_BYTES, ImageLayout, header_bytes
from flotilla.shared.weights.image.tensors import TORCH_DTYPES, flat_view

log = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class _Stored:
    """A tensor of a file."""

    path: Path
    spec: TensorSpec

    @property
    def numel(self) -> int:
        """Its elements."""
        return (self.spec.end - self.spec.start) // TORCH_DTYPES[self.spec.dtype].itemsize

    def read(self) -> Tensor:
        """Map it: the whole tensor, of which only what is touched is read."""
        start = self.spec.start - self.spec.start % mmap.ALLOCATIONGRANULARITY
        if self.numel == 0:
            return torch.empty(self.spec.shape, dtype=TORCH_DTYPES[self.spec.dtype])
        with self.path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), self.spec.end - start, access=mmap.ACCESS_COPY, offset=start)
        return flat_view(mapped, self.spec.dtype, self.spec.start - start, self.numel).view(self.spec.shape)


@dataclass(frozen=True)
class _Source:
    """The tensor of a file that is a piece of a parameter; ``start`` counts the parameter's elements."""

    start: int
    stored: _Stored


class StoredWeights:
    """Where each parameter of a model lies in its directory.

    Args:
        sources: by the parameter's path in the model, what makes it up, in order.
        made: whole parameters that the directory does not have, by their paths.
    """

    def __init__(self, sources: Mapping[str, Sequence[_Source]], made: Mapping[str, Tensor]) -> None:
        self._sources, self._made = sources, made

    @classmethod
    def of(cls, model: nn.Module, directory: Path, made: Mapping[str, Tensor]) -> Self | None:
        """Find a model's parameters; None where that takes more than their names and shapes: it is read whole then.

        Args:
            model: its parameters may be on ``meta``.
            directory: in Hugging Face format.
            made: parameters that the directory need not have.
        """
        try:
            stored = _stored_in(directory)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, WeightTransferFailed) as error:
            log.info("weights cannot be read in parts", extra={"directory": str(directory), "error": repr(error)})
            return None
        groups = distinct(model)
        prefix = f"{getattr(model, 'base_model_prefix', '')}."
        by_parameter: dict[int, list[_Source]] = defaultdict(list)
        made_too = {id(tied[0]): made[name] for name, tied in groups.items() if name in made and name not in stored}
        shapes = {name: tuple(tied[0].shape) for name, tied in groups.items() if id(tied[0]) not in made_too}
        for piece in pieces_of(model, shapes):
            # Checkpoints of a body alone have its own names.
            found = stored.get(piece.name) or stored.get(piece.name.removeprefix(prefix))
            if found is None or not _is(found.spec, piece):
                log.info("weights cannot be read in parts", extra={"directory": str(directory), "weight": piece.name})
                return None
            by_parameter[id(groups[piece.source][0])].append(_Source(piece.start, found))
        if unread := _persistent_buffers(model):
            log.info("weights cannot be read in parts", extra={"directory": str(directory), "buffer": unread[0]})
            return None
        same = {id(each): id(tied[0]) for tied in groups.values() for each in tied}
        names = {name: same[id(each)] for name, each in model.named_parameters(remove_duplicate=False)}
        return cls(
            {name: by_parameter[key] for name, key in names.items() if key in by_parameter},
            {name: made_too[key] for name, key in names.items() if key in made_too},
        )

    def whole(self, path: str) -> Tensor:
        """Read all of a parameter that is one tensor of a file, or was made."""
        if path in self._made:
            return self._made[path]
        [source] = self._sources[path]
        return source.stored.read()

    @torch.no_grad()
    def fill(self, module: nn.Module, home: torch.device, device: torch.device, prefix: str = "") -> None:
        """Give a module memory for what this rank has of it, and read that; what is not stored becomes 0.

        Args:
            module: the model or a part of it, divided as it is to be.
            home: where its parameters are.
            device: where it computes, and its buffers are.
            prefix: path of the module in the model, with a dot at its end.
        """
        _give_memory(module, home)
        for name, parameter in module.named_parameters():
            path = prefix + name
            if path in self._sources:
                _copy(parameter, self._sources[path])
            elif path in self._made:
                parameter.copy_(localized(self._made[path], parameter))
            else:
                local_of(parameter).zero_()
        for each in module.modules():
            for name, buffer in each.named_buffers(recurse=False):
                setattr(each, name, buffer.to(device))


@contextmanager
def without_memory() -> Iterator[None]:
    """Put parameters of modules that are made while this lasts on ``meta``; buffers are made as ever."""
    register = nn.Module.register_parameter

    def register_without_memory(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta:
            empty = torch.empty_like(param, device="meta")
            self._parameters[name] = nn.Parameter(empty, requires_grad=param.requires_grad)

    nn.Module.register_parameter = register_without_memory  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _give_memory(module: nn.Module, home: torch.device) -> None:
    """Replace parameters without memory in place: they stay the same objects, tied or known to FSDP as they are."""
    for parameter in list(module.parameters()):
        if parameter.is_meta:
            empty = torch.empty_like(parameter, device=home)
            given = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, given)  # type: ignore[no-untyped-call]
    # Here FSDP takes notice of the new memory.
    module.to(home)


def _copy(parameter: Tensor, sources: Sequence[_Source]) -> None:
    """Copy this rank's elements of a parameter."""
    local, index = local_of(parameter), index_of(parameter)
    if local.numel() == 0:
        return
    row = parameter.numel() // parameter.shape[0]
    if any(each.start % row + each.stored.numel > row for each in sources):
        # Not experts by their number, but one tensor, or several that divide it otherwise.
        tensors = [each.stored.read() for each in sources]
        whole = tensors[0] if len(tensors) == 1 else torch.cat([each.reshape(-1) for each in tensors])
        local.copy_(whole.view(parameter.shape)[index])
        return
    rows: dict[int, list[_Stored]] = defaultdict(list)
    for source in sources:
        rows[source.start // row].append(source.stored)
    for place, number in enumerate(torch.arange(parameter.shape[0])[index[0]].tolist()):
        expert = torch.cat([each.read().reshape(-1) for each in rows[number]])
        local[place].copy_(expert.view(parameter.shape[1:])[index[1:]])


def _is(spec: TensorSpec, piece: Piece) -> bool:
    return tuple(spec.shape) == piece.shape and TORCH_DTYPES[spec.dtype].is_floating_point


def _persistent_buffers(model: nn.Module) -> list[str]:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return sorted(model.state_dict().keys() - parameters)


def _stored_in(directory: Path) -> dict[str, _Stored]:
    """List the tensors of a directory as transformers chooses its files: the one, or those of an index."""
    names = [WEIGHTS]
    if not (directory / WEIGHTS).is_file():
        index: Mapping[str, Any] = json.loads((directory / INDEX).read_text(encoding="utf-8"))
        names = sorted(set(index["weight_map"].values()))
    found: dict[str, _Stored] = {}
    for name in names:
        path = directory / name
        with path.open("rb") as file:
            first = file.read(LENGTH_BYTES)
            layout = ImageLayout.parse(first + file.read(header_bytes(first) - LENGTH_BYTES))
        if layout.image_bytes != path.stat().st_size:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, its header says {layout.image_bytes}")
        found |= {spec.name: _Stored(path, spec) for spec in layout.tensors}
    return found
