"""Properties of a model that its configuration does not declare, found by computing some tokens with it."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from flotilla.services.trainer.data.packing import MicroLayout, ModelInput, build_input
from flotilla.services.trainer.models.attention import ATTENTION as BY_SEQUENCE
from flotilla.services.trainer.models.attention import attend_by_sequence
from flotilla.services.trainer.models.native.kernels import kernels_for
from flotilla.services.trainer.parallel.sequence import ATTENTION as ULYSSES
from flotilla.shared.vision.tower import Tower

log = logging.getLogger(__name__)

PROBE_TOKENS = 12
PROBE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}


@dataclass(frozen=True, eq=False)
class Traits:
    """How a model computes.

    Attributes:
        has_plain_head: whether logits are ``hidden W^T``, without bias, cap or scale.
        can_pack: whether attention stays within a given mask, so that a row may hold several sequences.
        can_share_prompts: whether two answers may follow one prompt in a row.
        hidden: [1, W, H] last hidden states of ``probe``'s tokens, which any other way to compute them must give.
    """

    has_plain_head: bool
    can_pack: bool
    can_share_prompts: bool
    hidden: Tensor


@torch.no_grad()
def traits_of(model: Any, device: torch.device, dtype: torch.dtype | None = None) -> Traits:
    """Compute with a model; every rank of a sharded one does it at once.

    Args:
        model: a Hugging Face causal LM or classifier, whole or sharded, but with undivided layers.
        device: where it computes.
        dtype: what it computes in; None: that of its weights.
    """
    ids = probe(model, 0, device)
    logits = model(input_ids=ids, use_cache=False).logits.float() if _has_linear_head(model) else None
    # Only a forward method of the model's own gathers what belongs to no layer: embedding, last norm, head.
    model.probed = partial(_probed, model, dtype or next(model.parameters()).dtype)
    register_fsdp_forward_method(model, "probed")
    try:
        found: Traits = model.probed(ids, logits)
    finally:
        del model.probed
    return found


@torch.no_grad()
def attends_apart(body: Any, compute: Callable[[ModelInput], Tensor], device: torch.device, dtype: torch.dtype) -> bool:
    """Let a model's attention go sequence by sequence, if it passes on to its layers where the sequences are.

    Args:
        body: what has the layers; of a model that can be packed, and whose answers can share prompts.
        compute: its last hidden states of an input, as they are computed in a step; every rank of a sharded model
            calls it at once.
        device: where it computes.
        dtype: what it computes in.
    """
    before = body.config._attn_implementation
    if before == BY_SEQUENCE:
        return True  # a copy of one that does
    if before not in {"sdpa", ULYSSES} or (device.type == "cpu" and kernels_for(torch.empty(0, dtype=dtype)) is None):
        return False
    if before == "sdpa":
        attend_by_sequence(body)
    try:
        apart, masked = (compute(shared_probe(body, device, attends_apart=each)) for each in (True, False))
        if agree(apart, masked, dtype):
            return True
    except (RuntimeError, ValueError, TypeError) as error:
        log.info("model does not take places: its packed rows have a mask", extra={"error": repr(error)})
    if before == "sdpa":
        body.set_attn_implementation(before)
    return False


def attends_by_position(model: Any) -> bool:
    """Whether a model's attention takes no mask, and sequences of a single row begin where positions do."""
    return str(model.config._attn_implementation).startswith("flash")


def probe(model: Any, seed: int, device: torch.device) -> Tensor:
    """Draw token ids [1, W]."""
    vocabulary = model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (1, PROBE_TOKENS), generator=generator).to(device)


def probe_input(model: Any, device: torch.device) -> ModelInput:
    """Make the input whose hidden states traits have."""
    ids = probe(model, 3, device)
    return ModelInput(ids, torch.arange(PROBE_TOKENS, device=device)[None], None, ids[0, :1], ids[0, :1])


def shared_probe(model: Any, device: torch.device, *, attends_apart: bool) -> ModelInput:
    """Make a row of two answers after their prompt, of ``PROBE_TOKENS`` each."""
    prompt, *answers = (probe(model, seed, device)[0] for seed in (4, 5, 6))
    token_ids = [torch.cat([prompt, each]).cpu().numpy() for each in answers]
    layout = MicroLayout(((0, 1),), 3 * PROBE_TOKENS, is_packed=True, shared={1: PROBE_TOKENS})
    places = np.arange(PROBE_TOKENS, 2 * PROBE_TOKENS)
    return build_input(layout, token_ids, {0: places, 1: places}, attends_apart=attends_apart).to(device)


def agree(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether two results of a model of some dtype are the same but for rounding."""
    if found.shape != expected.shape:
        return False
    tolerance = PROBE_TOLERANCE.get(dtype, 1e-4)
    return bool((found - expected).abs().max() <= tolerance * (1 + expected.abs().max()))


def _has_linear_head(model: Any) -> bool:
    head = model.get_output_embeddings()
    return isinstance(head, nn.Linear) and head.bias is None


def _probed(model: Any, dtype: torch.dtype, ids: Tensor, logits: Tensor | None) -> Traits:
    probing = _Probing(model, ids.device, dtype)
    can_pack = probing.can_pack()
    return Traits(
        has_plain_head=logits is not None and probing.is_plain(ids, logits),
        can_pack=can_pack,
        can_share_prompts=can_pack and not attends_by_position(model) and probing.can_share_prompts(),
        hidden=probing.hidden(input_ids=probe(model, 3, ids.device)),
    )


class _Probing:
    """A model while it is asked."""

    def __init__(self, model: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._model, self._device, self._dtype = model, device, dtype

    def is_plain(self, ids: Tensor, logits: Tensor) -> bool:
        """Whether logits are a product with the output embedding."""
        hidden = self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return agree((hidden @ self._model.get_output_embeddings().weight.T).float(), logits, self._dtype)

    def can_pack(self) -> bool:
        """Ask whether two sequences in one row are computed as each alone."""
        config = self._model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        uses_window = bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)
        if kinds != {"full_attention"} or (uses_window and not getattr(config, "layer_types", None)):
            return False
        first, second = self._probe(1), self._probe(2)
        joined = torch.cat([first, second], dim=1)
        owner = torch.arange(2, device=self._device).repeat_interleave(PROBE_TOKENS)
        mask = None if attends_by_position(self._model) else (owner[:, None] == owner[None, :]).tril()[None, None]
        positions = torch.arange(PROBE_TOKENS, device=self._device).repeat(2)[None]
        try:
            packed = self.hidden(input_ids=joined, attention_mask=mask, position_ids=positions)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
            log.info("model does not take a mask of its own: no packing", extra={"error": repr(error)})
            return False
        apart = torch.cat([self.hidden(input_ids=first), self.hidden(input_ids=second)], dim=1)
        return agree(packed, apart, self._dtype)

    def can_share_prompts(self) -> bool:
        """Ask whether two answers beside each other, after their prompt, are computed as each after the prompt alone.

        Not where a layer counts positions by their places in a row.
        """
        inputs = shared_probe(self._model, self._device, attends_apart=False)
        with_mask = {name: each for name, each in arguments_of(inputs).items() if name != "use_cache"}
        shared = self.hidden(**with_mask)
        prompt, answer, other = self._probe(4), self._probe(5), self._probe(6)
        apart = [self.hidden(input_ids=torch.cat([prompt, each], dim=1)) for each in (answer, other)]
        return agree(shared, torch.cat([apart[0], apart[1][:, PROBE_TOKENS:]], dim=1), self._dtype)

    def hidden(self, **arguments: Any) -> Tensor:
        """Compute last hidden states."""
        hidden: Tensor = self._model.base_model(**arguments, use_cache=False).last_hidden_state.float()
        return hidden

    def _probe(self, seed: int) -> Tensor:
        return probe(self._model, seed, self._device)


def arguments_of(inputs: ModelInput, tower: Tower | None = None) -> dict[str, Any]:
    """Return what a model is called with; for an input with images its language model, which ``tower`` belongs to."""
    if inputs.images is not None:
        assert tower is not None
        shown = {"position_ids": inputs.position_ids, "attention_mask": inputs.attention_mask, "use_cache": False}
        placed = {} if inputs.places is None else {"places": inputs.places}
        return {**tower.arguments(inputs.token_ids, inputs.images), **shown, **placed}
    arguments: dict[str, Any] = {"input_ids": inputs.token_ids, "use_cache": False}
    if inputs.is_varlen:
        rows = {"input_ids": inputs.token_ids, "position_ids": inputs.position_ids}
        return arguments | {name: each.reshape(1, -1) for name, each in rows.items()}
    if inputs.attention_mask is not None:
        arguments |= {"attention_mask": inputs.attention_mask, "position_ids": inputs.position_ids}
    if inputs.places is not None:
        arguments |= {"places": inputs.places, "position_ids": inputs.position_ids}
    return arguments
