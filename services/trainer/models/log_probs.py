"""A causal language model as a policy: log-probabilities and entropy of sampled tokens, for one micro-batch.

Hidden states are taken at the positions that predict a sampled token, and go through the output layer in chunks, so
that no [T, V] tensor exists. Models whose logits are more than ``hidden W^T`` (a bias, a soft cap, a scale), and models
whose attention does not stay within a given mask, are recognised by a probe when they are loaded.
"""

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from services.trainer.algorithms.log_probs import TokenStatistics, log_probs_and_entropy, statistics_from_logits
from services.trainer.data.packing import MicroLayout, ModelInput, Packing, build_input
from services.trainer.models.fused_layers import fuse_layers
from services.trainer.models.host_memory import ParkedTensors
from services.trainer.models.native.kernels import kernels_for
from services.trainer.parallel.fsdp import shard
from services.trainer.parallel.ranks import Ranks
from services.trainer.parallel.sequence import SequenceParallel
from services.trainer.parallel.tensor import divide_layers
from shared.errors import ModelError

log = logging.getLogger(__name__)

PROBE_TOKENS = 12
PROBE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}


def arguments_of(inputs: ModelInput) -> dict[str, Any]:
    """Return what a model is called with."""
    arguments: dict[str, Any] = {"input_ids": inputs.token_ids, "use_cache": False}
    if inputs.attention_mask is not None:
        arguments |= {"attention_mask": inputs.attention_mask, "position_ids": inputs.position_ids}
    return arguments


def hidden_states(body: Any, inputs: ModelInput, split: SequenceParallel | None) -> Tensor:
    """Compute the last hidden states: [rows, W, H]."""
    if split is not None:
        return split.hidden(body, inputs)
    hidden: Tensor = body(**arguments_of(inputs)).last_hidden_state
    return hidden


class Policy:
    """Computes what losses need of each sampled token.

    Args:
        model: a Hugging Face causal LM.
        temperature: of sampling; logits are divided by it, so that the policy that is trained is the one that sampled.
    """

    def __init__(self, model: nn.Module, *, temperature: float) -> None:
        self.model: Any = model
        self.temperature = temperature
        self.base: Any = self.model.base_model
        self.device = next(model.parameters()).device
        fuse_layers(model)
        self.has_plain_head = self._has_plain_head()
        self.can_pack = self._can_pack()
        self.can_share_prompts = self.can_pack and self._can_share_prompts()
        self._split: SequenceParallel | None = None
        self._parked: ParkedTensors | None = None
        if not self.has_plain_head:
            log.info("logits are more than a product with the output embedding: they are computed whole")

    @property
    def hidden_size(self) -> int:
        """Width of the model's hidden states."""
        return int(self.model.get_input_embeddings().embedding_dim)

    def split_sequences(self, split: SequenceParallel) -> None:
        """Compute every row together with other ranks; before the weights are sharded.

        Raises:
            ModelError: the model's layers or head do not allow it.
        """
        ids = self._probe(3)
        inputs = ModelInput(ids, torch.arange(PROBE_TOKENS, device=self.device)[None], None, ids[0, :1], ids[0, :1])
        with torch.no_grad():
            expected = self._hidden(input_ids=ids)
            split.install(self.base)
            if not (self.can_pack and self.has_plain_head and self._agree(split.hidden(self.base, inputs), expected)):
                raise ModelError(
                    f"parallelism.sequence_parallel does not work with {type(self.model).__name__}, whose layers are "
                    "not all plain attention, or whose logits are more than a product with the output embedding"
                )
        self._split = split

    def park(self) -> None:
        """Keep the weights, which nobody changes, in the host's memory but for ``on_device``; after ``shard``."""
        self._parked = ParkedTensors(self.model.parameters(), is_constant=True)

    def on_device(self) -> AbstractContextManager[None]:
        """Have the weights where they compute while the block runs."""
        return nullcontext() if self._parked is None else self._parked.on_device()

    def shard(self, ranks: Ranks) -> None:
        """Divide the weights among ranks. What computes with them from here on gathers them first.

        Raises:
            ModelError: the model's layers cannot be divided as the job says.
        """
        ids = self._probe(3)
        with torch.no_grad():
            expected = self._hidden(input_ids=ids)
            divide_layers(self.model, ranks)
            if (ranks.tensor_size > 1 or ranks.expert_mesh is not None) and not self._agree(
                self._hidden(input_ids=ids), expected
            ):
                raise ModelError(
                    f"{type(self.model).__name__} computes something else when its layers are divided among ranks: "
                    "leave parallelism.tensor_parallel and parallelism.expert_parallel out"
                )
        shard(self.model, ranks)
        # Only the model's own ``forward`` would gather what belongs to no layer: embedding, last norm, head.
        self.model.token_figures = self._figures
        self.model.score_figures = self._scores
        for name in ("token_figures", "score_figures"):
            register_fsdp_forward_method(self.model, name)

    def statistics(
        self, inputs: ModelInput, *, with_entropy: bool, with_sum_pi_squared: bool = False
    ) -> TokenStatistics:
        """Compute log-probs, and the entropy if wanted, of the labels: [N] each, in their order."""
        compute = getattr(self.model, "token_figures", self._figures)
        return TokenStatistics(*compute(inputs, with_entropy, with_sum_pi_squared))

    def _figures(self, inputs: ModelInput, with_entropy: bool, with_squares: bool) -> tuple[Tensor | None, ...]:
        # A tuple, whose tensors FSDP finds: it gathers weights for their backward pass.
        if not self.has_plain_head:
            logits = self.model(**arguments_of(inputs)).logits
            chosen = logits.reshape(-1, logits.shape[-1]).index_select(0, inputs.predictors)
            found = statistics_from_logits(chosen, inputs.labels, self.temperature)
        else:
            hidden = hidden_states(self.base, inputs, self._split)
            chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, inputs.predictors)
            weight = self.model.get_output_embeddings().weight
            found = log_probs_and_entropy(
                chosen,
                weight,
                inputs.labels,
                self.temperature,
                with_entropy=with_entropy,
                with_sum_pi_squared=with_squares,
                kernels=kernels_for(chosen, weight),
            )
        return found.log_probs, found.entropy, found.sum_pi_squared

    def scores(self, inputs: ModelInput, positions: Tensor) -> Tensor:
        """Compute what a sequence classifier's head gives at flat positions [N]: [N] float32, with gradient."""
        compute = getattr(self.model, "score_figures", self._scores)
        found: Tensor = compute(inputs, positions)
        return found

    def _scores(self, inputs: ModelInput, positions: Tensor) -> Tensor:
        arguments = {"input_ids": inputs.token_ids, "use_cache": False}
        if inputs.attention_mask is not None:
            arguments |= {"attention_mask": inputs.attention_mask, "position_ids": inputs.position_ids}
        hidden = self.base(**arguments).last_hidden_state
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, positions)
        found: Tensor = self.model.score(chosen).squeeze(-1).float()
        return found

    def resolve_packing(self, wanted: Packing) -> Packing:
        """Return how rows may be filled.

        Raises:
            ModelError: packed rows were asked for, and this model's sequences would see each other.
        """
        if self.can_pack:
            return wanted
        if wanted == "packed":
            raise ModelError(
                f"optimisation.packing: packed does not work with {type(self.model).__name__}, whose layers are not "
                "all plain attention under a mask: use auto or padded"
            )
        return "padded"

    def _probe(self, seed: int) -> Tensor:
        vocabulary = self.model.get_input_embeddings().num_embeddings
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, vocabulary, (1, PROBE_TOKENS), generator=generator).to(self.device)

    @torch.no_grad()
    def _has_plain_head(self) -> bool:
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or head.bias is not None:
            return False
        ids = self._probe(0)
        expected = self.model(input_ids=ids, use_cache=False).logits.float()
        hidden = self.base(input_ids=ids, use_cache=False).last_hidden_state
        return self._agree((hidden @ head.weight.T).float(), expected)

    @torch.no_grad()
    def _can_pack(self) -> bool:
        config = self.model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        uses_window = bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)
        if kinds != {"full_attention"} or (uses_window and not getattr(config, "layer_types", None)):
            return False
        first, second = self._probe(1), self._probe(2)
        joined = torch.cat([first, second], dim=1)
        owner = torch.arange(2, device=self.device).repeat_interleave(PROBE_TOKENS)
        mask = (owner[:, None] == owner[None, :]).tril()[None, None]
        positions = torch.arange(PROBE_TOKENS, device=self.device).repeat(2)[None]
        try:
            packed = self._hidden(input_ids=joined, attention_mask=mask, position_ids=positions)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            log.info("model does not take a mask of its own: no packing", extra={"error": repr(error)})
            return False
        apart = torch.cat([self._hidden(input_ids=first), self._hidden(input_ids=second)], dim=1)
        return self._agree(packed, apart)

    @torch.no_grad()
    def _can_share_prompts(self) -> bool:
        """Ask whether two answers beside each other, after their prompt, are computed as each after the prompt alone.

        Not where a layer counts positions by their places in a row.
        """
        prompt, answer, other = self._probe(4), self._probe(5), self._probe(6)
        token_ids = [torch.cat([prompt, each], dim=1)[0].cpu().numpy() for each in (answer, other)]
        layout = MicroLayout(((0, 1),), 3 * PROBE_TOKENS, is_packed=True, shared={1: PROBE_TOKENS})
        places = np.arange(PROBE_TOKENS, 2 * PROBE_TOKENS)
        inputs = build_input(layout, token_ids, {0: places, 1: places}).to(self.device)
        with_mask = {name: each for name, each in arguments_of(inputs).items() if name != "use_cache"}
        shared = self._hidden(**with_mask)
        apart = [self._hidden(input_ids=torch.from_numpy(ids)[None].to(self.device)) for ids in token_ids]
        return self._agree(shared, torch.cat([apart[0], apart[1][:, PROBE_TOKENS:]], dim=1))

    def _hidden(self, **arguments: Tensor) -> Tensor:
        hidden: Tensor = self.base(**arguments, use_cache=False).last_hidden_state.float()
        return hidden

    def _agree(self, found: Tensor, expected: Tensor) -> bool:
        if found.shape != expected.shape:
            return False
        tolerance = PROBE_TOLERANCE.get(next(self.model.parameters()).dtype, 1e-4)
        return bool((found - expected).abs().max() <= tolerance * (1 + expected.abs().max()))
