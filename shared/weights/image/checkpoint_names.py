"""The names that a model's weights have in its Hugging Face checkpoint, and where each lies in memory.

Since version 5 transformers keeps some weights fused in memory (all experts of a layer are one tensor) that are many
tensors in the checkpoint. Engines and checkpoints know the checkpoint's names only.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

Shape = tuple[int, ...]
_LAYER = re.compile(r"^.*?\.\d+\.")


@dataclass(frozen=True)
class Piece:
    """A tensor of the checkpoint.

    Attributes:
        name: in the checkpoint.
        source: the parameter that contains it, by its path in the module.
        start: its first element in the parameter, counted in elements of the flat, contiguous parameter.
        shape: in the checkpoint.
    """

    name: str
    source: str
    start: int
    shape: Shape

    @property
    def numel(self) -> int:
        """Its elements."""
        return torch.Size(self.shape).numel()

    def of(self, parameter: Tensor) -> Tensor:
        """Return the piece as a view of its parameter, which is contiguous if it has several."""
        if self.name == self.source:
            return parameter
        return parameter.view(-1)[self.start : self.start + self.numel].view(self.shape)


def pieces_of(module: nn.Module, shapes: Mapping[str, Shape]) -> list[Piece]:
    """List the checkpoint's tensors that make up some parameters of a module, in the order of their bytes.

    Asks transformers to undo its conversions on tensors that hold their own positions, one layer at a time. Where a
    tensor of the checkpoint is no contiguous part of one parameter (a transposed one), the parameter keeps its own
    name, which is logged.

    Args:
        module: any module; one that transformers did not make has the names of its parameters.
        shapes: the parameters' shapes by their paths in the module.
    """
    own = [Piece(name, name, 0, tuple(shape)) for name, shape in shapes.items()]
    if not hasattr(module, "config") or not hasattr(module, "save_pretrained"):
        return own
    layers: dict[str, list[Piece]] = defaultdict(list)
    for piece in own:
        found = _LAYER.match(piece.name)
        layers[found.group() if found else piece.name].append(piece)
    in_checkpoint = {piece.name: piece for piece in own} | {
        piece.name: piece for layer in layers.values() for piece in _undone(module, layer)
    }
    by_source: dict[str, list[Piece]] = defaultdict(list)
    for piece in in_checkpoint.values():
        by_source[piece.source].append(piece)
    return [piece for whole in own for piece in _in_order(whole, by_source[whole.name])]


def keep_names(module: Any) -> None:
    """Let a module whose class is about to be replaced, as FSDP does, keep the names of its checkpoint.

    transformers finds some of its conversions by the name of the class, and others by the kind of model.
    """
    if not hasattr(module, "config") or not hasattr(module, "save_pretrained"):
        return
    if getattr(module, "_weight_conversions", None) is not None:
        return
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    found = get_model_conversion_mapping(module, add_legacy=False)
    # As transformers has it where a module was not loaded: it is unknown whether there was a prefix.
    module._weight_conversions = [each for each in found if not isinstance(each, PrefixChange)]


def _undone(module: Any, layer: list[Piece]) -> list[Piece]:
    """List what a layer's parameters are in the checkpoint; those that stay as they are may be missing."""
    from transformers.core_model_loading import revert_weight_conversion

    names = revert_weight_conversion(module, {p.name: torch.empty(p.shape, device="meta") for p in layer})
    if {name: tuple(tensor.shape) for name, tensor in names.items()} == {p.name: p.shape for p in layer}:
        return []
    starts, end = {}, 0
    positions = {}
    for piece in layer:
        starts[piece.name] = end
        positions[piece.name] = torch.arange(end, end + piece.numel).view(piece.shape)
        end += piece.numel
    found = []
    for name, where in revert_weight_conversion(module, positions).items():
        flat = where.reshape(-1)
        first = int(flat[0])
        if not torch.equal(flat, torch.arange(first, first + flat.numel())):
            continue
        source = next(n for n in reversed(starts) if starts[n] <= first)
        found.append(Piece(name, source, first - starts[source], tuple(where.shape)))
    return found


def _in_order(whole: Piece, pieces: list[Piece]) -> list[Piece]:
    """Order the pieces of one parameter; if they do not make it up exactly, it stays one piece under its own name."""
    renamed = sorted((p for p in pieces if p != whole), key=lambda p: p.start)
    end = 0
    for piece in renamed:
        if piece.start != end:
            break
        end += piece.numel
    if end == whole.numel and renamed:
        return renamed
    if renamed:
        log.warning("a weight keeps its name in memory: its checkpoint's are other", extra={"weight": whole.name})
    return [whole]
