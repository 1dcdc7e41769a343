"""Ulysses sequence parallelism: each rank of a group computes a part of every row, and all of it for some heads.

A layer's linear maps see the rank's own positions. Around attention the ranks exchange: each gives its positions of the
others' heads and gets all positions of its own, and back. Hidden states are gathered at the end.

Source: Jacobs et al., DeepSpeed Ulysses, 2023.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from flotilla.services.trainer.data.packing import ModelInput
from flotilla.services.trainer.data.places import SequencePlaces
from flotilla.shared.errors import ModelError
from flotilla.shared.vision.tower import Tower

ATTENTION = "flotilla_ulysses"
TOWER_CONFIG = "vision_config"
_STATE = "sequence_parallel"
Attend = Callable[[Tensor, Tensor, Tensor, SequencePlaces, float | None], Tensor]
"""Attends within each sequence: queries, keys and values [B, H, T, D], their places and scaling to [B, T, H, D]."""


class SequenceParallel:
    """The ranks that share rows.

    Args:
        group: their process group.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.mask: Tensor | None = None
        """[rows, 1, W, W] of the rows under way, whole; None for plain causal attention."""
        self.places: SequencePlaces | None = None
        """Where the sequences of the rows under way are, if attention goes one by one."""
        self.width = 0
        """Positions of the rows under way, without those that make them divisible."""

    def install(self, body: nn.Module, attend: Attend) -> None:
        """Make a model's attention exchange heads for positions; before its weights are sharded.

        Args:
            body: what has the layers.
            attend: what computes attention where it goes sequence by sequence.

        Raises:
            ModelError: its heads cannot be divided.
        """
        config: Any = body.config
        text = config.get_text_config()
        heads = {text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads}
        if any(count % self.size for count in heads):
            raise ModelError(
                f"parallelism.sequence_parallel {self.size} does not divide the model's {sorted(heads)} attention "
                "heads: choose a common divisor"
            )
        self.attend = attend
        AttentionInterface.register(ATTENTION, _attention)
        # A tower computes whole images on each rank.
        kinds = {name: ATTENTION for name in config.sub_configs if name != TOWER_CONFIG}
        body.set_attn_implementation({"": ATTENTION, **kinds})  # type: ignore[operator]
        for module in body.modules():
            setattr(module, _STATE, self)

    def hidden(self, body: Any, inputs: ModelInput, tower: Tower | None = None) -> Tensor:
        """Compute the last hidden states [rows, W, H] of all positions on every rank of the group.

        Args:
            body: what has the layers.
            inputs: rows; each rank of the group has the same.
            tower: computes their images, each rank all of them.
        """
        width = inputs.token_ids.shape[1]
        spare = -width % self.size
        share = (width + spare) // self.size
        own = slice(self.rank * share, (self.rank + 1) * share)
        ids, positions = (nn.functional.pad(each, (0, spare)) for each in (inputs.token_ids, inputs.position_ids))
        self.mask = None if inputs.attention_mask is None else _widened(inputs.attention_mask, spare)
        self.places, self.width = inputs.places, width
        ids, positions = ids[:, own], positions[..., own]
        if inputs.images is None:
            found = body(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        else:
            assert tower is not None
            shown = tower.arguments(ids, inputs.images.within(width, own))
            found = body.language_model(**_beside(shown, positions)).last_hidden_state
        gathered: Tensor = _Gather.apply(found, self)  # type: ignore[no-untyped-call]
        return gathered[:, :width]


def _beside(shown: Mapping[str, Any], positions: Tensor) -> dict[str, Any]:
    return {**shown, "position_ids": positions, "use_cache": False}


def _widened(mask: Tensor, spare: int) -> Tensor:
    """Add positions that attend to themselves alone: a row of the mask without any would make NaN."""
    wide = nn.functional.pad(mask, (0, spare, 0, spare))
    width = mask.shape[-1]
    padding = torch.arange(width, width + spare, device=mask.device)
    wide[..., padding, padding] = True
    return wide


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend as sdpa does, from [B, heads, own positions, D]; transformers' own mask is of these positions only."""
    group: SequenceParallel = getattr(module, _STATE)
    own_heads = [_Exchange.apply(each, group, 1, 2) for each in (query, key, value)]  # type: ignore[no-untyped-call]
    if group.places is None:
        found, _ = sdpa_attention_forward(module, *own_heads, group.mask, **options)  # type: ignore[no-untyped-call]
    else:
        spare = query.shape[2] * group.size - group.width
        rows = [each[:, :, : group.width] for each in own_heads]
        found = group.attend(rows[0], rows[1], rows[2], group.places, options.get("scaling"))
        found = nn.functional.pad(found, (0, 0, 0, 0, 0, spare))
    exchanged: Tensor = _Exchange.apply(found, group, 1, 2)  # type: ignore[no-untyped-call]
    return exchanged, None


class _Exchange(torch.autograd.Function):
    """Divide one dim among the ranks and get all of another."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: SequenceParallel, divided: int, joined: int) -> Tensor:
        ctx.arguments = group, divided, joined
        return _exchanged(values, group, divided, joined)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        group, divided, joined = ctx.arguments
        return _exchanged(gradient, group, joined, divided), None, None, None


def _exchanged(values: Tensor, group: SequenceParallel, divided: int, joined: int) -> Tensor:
    given = torch.stack(values.chunk(group.size, dim=divided))
    taken = torch.empty_like(given)
    dist.all_to_all_single(taken, given, group=group.group)
    return torch.cat(taken.unbind(0), dim=joined)


class _Gather(torch.autograd.Function):
    """Join the positions of all ranks; each computes the same with them, so their gradients are added up."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: SequenceParallel) -> Tensor:
        ctx.group = group
        found = [torch.empty_like(values) for _ in range(group.size)]
        dist.all_gather(found, values.contiguous(), group=group.group)
        return torch.cat(found, dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        group: SequenceParallel = ctx.group
        added = gradient.contiguous().clone()
        dist.all_reduce(added, group=group.group)
        return added.chunk(group.size, dim=1)[group.rank].contiguous(), None
