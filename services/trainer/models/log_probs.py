"""A causal language model as a policy: log-probabilities and entropy of sampled tokens, for one micro-batch.

Hidden states are taken at the positions that predict a sampled token, and go through the output layer in chunks, so
that no [T, V] tensor exists. Models whose logits are more than ``hidden W^T`` (a bias, a soft cap, a scale), and models
whose attention does not stay within a given mask, are recognised by a probe when they are loaded.
"""

import copy
import gc
import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from flotilla.services.trainer.algorithms.log_probs import (
    Diverge,
    TokenStatistics,
    chunked_log_probs_and_divergence,
    log_probs_and_divergence,
    log_probs_and_entropy,
    statistics_from_logits,
)
from flotilla.services.trainer.data.packing import ModelInput, Packing
from flotilla.services.trainer.models.attention import attended_by_sequence
from flotilla.services.trainer.models.fused_layers import fuse_layers
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.services.trainer.models.native.kernels import kernels_for
from flotilla.services.trainer.models.offloading import ParkedTensors
from flotilla.services.trainer.models.stored_weights import StoredWeights
from flotilla.services.trainer.models.traits import (
    Traits,
    agree,
    arguments_of,
    attends_apart,
    attends_by_position,
    probe_input,
    traits_of,
)
from flotilla.services.trainer.parallel.fsdp import shard
from flotilla.services.trainer.parallel.ranks import ONE_RANK, Ranks
from flotilla.services.trainer.parallel.sequence import SequenceParallel
from flotilla.services.trainer.parallel.tensor import divide_layers
from flotilla.shared.errors import ModelError
from flotilla.shared.vision.tower import Tower

log = logging.getLogger(__name__)


def hidden_states(body: Any, inputs: ModelInput, split: SequenceParallel | None, tower: Tower | None = None) -> Tensor:
    """Compute the last hidden states: [rows, W, H]."""
    if split is not None:
        return split.hidden(body, inputs, tower)
    if inputs.images is not None:
        shown: Tensor = body.language_model(**arguments_of(inputs, tower)).last_hidden_state
        return shown
    hidden: Tensor = body(**arguments_of(inputs)).last_hidden_state
    return hidden


class Policy:
    """Computes what losses need of each sampled token.

    Args:
        model: a Hugging Face causal LM.
        temperature: of sampling; logits are divided by it, so that the policy that is trained is the one that sampled.
            Sequences that were sampled at another one are divided by that.
        stored: where the model's weights are, if they are to be read after it is sharded.
        ranks: that it will be sharded among; every one of them makes it.
        is_exact: compute with transformers' and torch's own operators alone, as an engine does that is to have the same
            bits (``exactness: bitwise``); each pass has one sequence then.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float,
        stored: StoredWeights | None = None,
        ranks: Ranks = ONE_RANK,
        is_exact: bool = False,
    ) -> None:
        self.model: Any = model
        self.temperature = temperature
        self.base: Any = self.model.base_model
        self.device = next(model.parameters()).device if stored is None else ranks.device
        self._kind = type(model).__name__
        self._stored = stored
        self.is_exact = is_exact
        if is_exact and self.device.type != "cpu":
            raise ModelError(f"exactness bitwise is computed on a CPU, and the trainer's device is {self.device}")
        if self.device.type == "cpu" and not is_exact:
            fuse_layers(model)
        self._split: SequenceParallel | None = None
        self.tower: Tower | None = None
        """What computes images, where prompts have any."""
        self._parked: ParkedTensors | None = None
        self._traits: Traits | None = None
        if stored is None:
            self._traits = self._said(traits_of(model, self.device))
        elif ranks.shares_computation:
            self._traits = self._said(traits_of_twin(model, stored, ranks))
        self._compute_dtype: torch.dtype | None = None
        self.routers: Any = None
        """``RouterLosses`` of the model, where the spec has some."""
        self.routing: Any = None
        """``Routing`` of the model, where the spec replays what its routers chose."""
        self.attends_apart = False
        """Whether attention goes sequence by sequence in packed rows, which need no mask then."""
        if stored is None:
            self.choose_attention(self)

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        temperature: float,
        ranks: Ranks,
        *,
        is_trained: bool = True,
        is_exact: bool = False,
    ) -> "Policy":
        """Make the policy of a model that was loaded, or made to be read later."""
        if not is_trained:
            loaded.model.requires_grad_(False)
        return cls(loaded.model, temperature=temperature, stored=loaded.stored, ranks=ranks, is_exact=is_exact)

    def _said(self, traits: Traits) -> Traits:
        if not traits.has_plain_head:
            log.info("logits are more than a product with the output embedding: they are computed whole")
        return traits

    @property
    def traits(self) -> Traits:
        """How the model computes; known once it has its weights."""
        assert self._traits is not None
        return self._traits

    @property
    def has_plain_head(self) -> bool:
        """Whether logits are a product with the output embedding."""
        return self.traits.has_plain_head

    @property
    def can_pack(self) -> bool:
        """Whether rows may hold several sequences."""
        return self.traits.can_pack

    @property
    def can_share_prompts(self) -> bool:
        """Whether answers in a row may follow one prompt."""
        return self.traits.can_share_prompts

    @property
    def is_varlen(self) -> bool:
        """Whether attention finds the sequences of packed rows by their positions, without a mask."""
        return attends_by_position(self.model)

    @property
    def hidden_size(self) -> int:
        """Width of the model's hidden states."""
        return int(self.model.get_input_embeddings().embedding_dim)

    def split_sequences(self, split: SequenceParallel) -> None:
        """Compute every row together with other ranks; before the weights are sharded.

        Raises:
            ModelError: the model's heads cannot be divided.
        """
        self.attends_apart = False
        split.install(self.base, attended_by_sequence)
        self._split = split

    def show_images(self, tower: Tower) -> None:
        """Take images, which a tower of the model computes; before rows are computed.

        Raises:
            ModelError: the model's way to compute rows does not go with them.
        """
        if not self.has_plain_head or self.is_varlen:
            what = "model.attention flash" if self.is_varlen else f"a head as that of {self._kind}"
            raise ModelError(f"data.images does not go with {what}: leave one of them out")
        self.tower = tower

    def park(self) -> None:
        """Keep the frozen weights in the host's memory but for ``on_device``; after ``shard``."""
        self._parked = ParkedTensors(self.model.parameters(), is_constant=True)

    def on_device(self) -> AbstractContextManager[None]:
        """Have the weights where they compute while the block runs."""
        return nullcontext() if self._parked is None else self._parked.on_device()

    def shard(self, ranks: Ranks) -> None:
        """Divide the weights among ranks. What computes with them from here on gathers them first.

        Raises:
            ModelError: the model's layers cannot be divided as the job says.
        """
        self.attends_apart, self._compute_dtype = False, ranks.compute_dtype
        divide_layers(self.model, ranks)
        shard(self.model, ranks)
        if self._stored is not None:
            self._stored.fill(self.model, ranks.home, ranks.device)
        # Only the model's own ``forward`` would gather what belongs to no layer: embedding, last norm, head.
        self.model.token_figures = self._figures
        self.model.score_figures = self._scores
        self.model.hidden_figures = self._hidden
        self.model.logit_figures = self._logits
        self.model.compared_figures = self._compared
        for name in ("token_figures", "score_figures", "hidden_figures", "logit_figures", "compared_figures"):
            register_fsdp_forward_method(self.model, name)
        if self._traits is None:
            self._traits = self._said(traits_of(self.model, self.device, ranks.compute_dtype))
        elif ranks.shares_computation:
            self._check_same(ranks.compute_dtype)

    def choose_attention(self, policy: "Policy") -> None:
        """Let attention go sequence by sequence in packed rows, where it gives the same; once weights are sharded.

        Args:
            policy: that is trained; rows are filled as it can read them.
        """
        if policy.can_share_prompts and self.can_share_prompts and not self.is_exact:
            compute = getattr(self.model, "hidden_figures", self._hidden)
            dtype = self._compute_dtype or next(self.model.parameters()).dtype
            self.attends_apart = attends_apart(self.base, compute, self.device, dtype)

    @torch.no_grad()
    def _check_same(self, dtype: torch.dtype | None) -> None:
        """Refuse a model that computes something else together with other ranks."""
        is_same = self._split is None or (self.can_pack and self.has_plain_head)
        if is_same:
            found = self.model.hidden_figures(probe_input(self.model, self.device))
            is_same = agree(found, self.traits.hidden, dtype or next(self.model.parameters()).dtype)
        if not is_same and self._split is not None:
            raise ModelError(
                f"parallelism.sequence_parallel does not work with {self._kind}, whose layers are not all plain "
                "attention, or whose logits are more than a product with the output embedding: leave it out, and each "
                "rank computes sequences of its own"
            )
        if not is_same:
            raise ModelError(
                f"{self._kind} computes something else when its layers are divided among ranks: leave "
                "parallelism.tensor_parallel and parallelism.expert_parallel out"
            )

    def _hidden(self, inputs: ModelInput) -> Tensor:
        return hidden_states(self.base, inputs, self._split).float()

    def statistics(
        self, inputs: ModelInput, *, with_entropy: bool, with_sum_pi_squared: bool = False
    ) -> TokenStatistics:
        """Compute log-probs, and the entropy if wanted, of the labels: [N] each, in their order."""
        compute = getattr(self.model, "token_figures", self._figures)
        return TokenStatistics(*compute(inputs, with_entropy, with_sum_pi_squared))

    def _figures(self, inputs: ModelInput, with_entropy: bool, with_squares: bool) -> tuple[Tensor | None, ...]:
        temperature = inputs.temperature_of(self.temperature)
        # A tuple, whose tensors FSDP finds: it gathers weights for their backward pass.
        if self.is_exact or not self.has_plain_head:
            logits = self.model(**arguments_of(inputs)).logits
            chosen = logits.reshape(-1, logits.shape[-1]).index_select(0, inputs.predictors)
            found = statistics_from_logits(chosen, inputs.labels, temperature)
        else:
            hidden = hidden_states(self.base, inputs, self._split, self.tower)
            chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, inputs.predictors)
            weight = self.model.get_output_embeddings().weight
            found = log_probs_and_entropy(
                chosen,
                weight,
                inputs.labels,
                temperature,
                with_entropy=with_entropy,
                with_sum_pi_squared=with_squares,
                # They take one temperature.
                kernels=None if isinstance(temperature, Tensor) else kernels_for(chosen, weight),
            )
        return found.log_probs, found.entropy, found.sum_pi_squared

    def logits(self, inputs: ModelInput) -> Tensor:
        """Compute the logits that predict the labels: [N, V], in the type that the model computes in."""
        compute = getattr(self.model, "logit_figures", self._logits)
        found: Tensor = compute(inputs)
        return found

    def _logits(self, inputs: ModelInput) -> Tensor:
        if not self.has_plain_head:
            logits = self.model(**arguments_of(inputs)).logits
            whole: Tensor = logits.reshape(-1, logits.shape[-1]).index_select(0, inputs.predictors)
            return whole
        hidden = hidden_states(self.base, inputs, self._split)
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, inputs.predictors)
        found: Tensor = chosen @ self.model.get_output_embeddings().weight.to(chosen.dtype).T
        return found

    def compared(self, inputs: ModelInput, teacher_logits: Tensor, diverge: Diverge) -> tuple[Tensor, Tensor]:
        """Compute the labels' log-probs, and how far the policy is from a teacher there: [N] each, with gradient.

        Args:
            inputs: of a micro-batch.
            teacher_logits: [N, V'], those of the labels under the teacher, where V' is at least V.
            diverge: computes how far.
        """
        compute = getattr(self.model, "compared_figures", self._compared)
        log_probs, divergence = compute(inputs, teacher_logits, diverge)
        return log_probs, divergence

    def _compared(self, inputs: ModelInput, teacher_logits: Tensor, diverge: Diverge) -> tuple[Tensor, Tensor]:
        if not self.has_plain_head:
            return log_probs_and_divergence(self._logits(inputs), inputs.labels, teacher_logits, diverge)
        hidden = hidden_states(self.base, inputs, self._split)
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, inputs.predictors)
        weight = self.model.get_output_embeddings().weight
        return chunked_log_probs_and_divergence(chosen, weight, inputs.labels, teacher_logits, diverge=diverge)

    def scores(self, inputs: ModelInput, positions: Tensor) -> Tensor:
        """Compute what a sequence classifier's head gives at flat positions [N]: [N] float32, with gradient."""
        compute = getattr(self.model, "score_figures", self._scores)
        found: Tensor = compute(inputs, positions)
        return found

    def _scores(self, inputs: ModelInput, positions: Tensor) -> Tensor:
        hidden = self.base(**arguments_of(inputs)).last_hidden_state
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
                f"optimisation.packing: packed does not work with {self._kind}, whose layers are not "
                "all plain attention under a mask: use auto or padded"
            )
        return "padded"


def traits_of_twin(model: nn.Module, stored: StoredWeights, ranks: Ranks, path: str = "") -> Traits:
    """Compute with a copy that each rank has a part of and whose layers are whole, which is thrown away.

    Args:
        model: without weights.
        stored: where they are.
        ranks: the job.
        path: of the model in what is stored, with a dot at its end.
    """
    twin = copy.deepcopy(model)
    shard(twin, ranks.undivided)
    stored.fill(twin, ranks.home, ranks.device, path)
    found = traits_of(twin, ranks.device, ranks.compute_dtype)
    del twin
    # Its modules and FSDP's states refer to one another.
    gc.collect()
    return found
