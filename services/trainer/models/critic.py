"""A critic: what reward is still to come before each sampled token.

The policy's body, copied when training starts, with a linear head of its own that begins at 0; or a model of its own,
with its head where it is a reward model. It has its own optimiser under the same schedule, and never leaves the
trainer.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from flotilla.services.trainer.algorithms.aggregation import Denominators
from flotilla.services.trainer.algorithms.metrics import Metrics
from flotilla.services.trainer.algorithms.objective import value_objective
from flotilla.services.trainer.algorithms.value import ReturnMoments
from flotilla.services.trainer.data.micro_batch import MicroBatch
from flotilla.services.trainer.data.packing import ModelInput
from flotilla.services.trainer.models.attention import attended_by_sequence
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.services.trainer.models.log_probs import Policy, hidden_states, traits_of_twin
from flotilla.services.trainer.models.optimizer import PolicyOptimizer, UpdateResult
from flotilla.services.trainer.models.traits import Traits, agree, attends_apart, probe_input, traits_of
from flotilla.services.trainer.parallel.fsdp import shard
from flotilla.services.trainer.parallel.ranks import ONE_RANK, MeshShape, Ranks
from flotilla.services.trainer.parallel.sequence import SequenceParallel
from flotilla.services.trainer.parallel.tensor import divide_layers
from flotilla.services.trainer.weights.parts import localized
from flotilla.shared.config.sections.algorithm import ValueLossConfig
from flotilla.shared.config.sections.optimisation import OptimisationConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import ModelError

HEAD = "value_head."
MOMENTS = ("count", "mean", "variance")


class Critic:
    """Estimates values and learns them.

    Args:
        policy: the causal LM whose body is copied if there is no model of its own.
        config: the critic's section.
        optimisation: of the policy; the critic's learning rate replaces its peak if the section has one.
        total_updates: of the whole experiment, for the schedule.
        own: the model that it begins as.
        is_offloaded: whether the optimiser's moments are in the host's memory between updates.
        ranks: among which it is divided and its passes are shared.
        is_alone: whether they are divided so for the critic alone: that it computes the same nevertheless is checked.

    Raises:
        ModelError: the model's configuration lacks the width of its hidden states.
    """

    def __init__(
        self,
        policy: LoadedModel,
        config: ValueLossConfig,
        optimisation: OptimisationConfig,
        total_updates: int,
        *,
        own: LoadedModel | None = None,
        is_offloaded: bool = False,
        ranks: Ranks = ONE_RANK,
        is_alone: bool = False,
    ) -> None:
        self.ranks, self._is_alone = ranks, is_alone
        source = (policy if own is None else own).model
        assert isinstance(source.base_model, nn.Module)
        body = copy.deepcopy(source.base_model) if own is None else source.base_model
        self.config = config
        self._body, self._stored = body, (policy if own is None else own).stored
        path = next(name for name, each in source.named_modules() if each is source.base_model)
        self._path = f"{path}." if path else ""
        self._split: SequenceParallel | None = None
        self._traits: Traits | None = None
        self.attends_apart = False
        """Whether attention goes sequence by sequence in packed rows, which need no mask then."""
        if is_alone and ranks.shares_computation and self._stored is not None:
            self._traits = traits_of_twin(body, self._stored, ranks, self._path)
        elif is_alone and ranks.shares_computation:
            self._traits = traits_of(body, ranks.device)
        self._head = nn.Linear(_width(body), 1, dtype=torch.float32)
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        if own is not None:
            _take_head(own, self._head)
        if self._stored is None:
            self._head.to(next(body.parameters()).device)
        optimisation = self._own(optimisation)
        self.moments = ReturnMoments.none()
        self._optimisation, self._total_updates, self._is_offloaded = optimisation, total_updates, is_offloaded
        if self._stored is None:
            self.optimizer = self._new_optimizer()

    def _own(self, optimisation: OptimisationConfig) -> OptimisationConfig:
        own = {"learning_rate": self.config.learning_rate, "warmup_updates": self.config.warmup_updates}
        return optimisation.model_copy(update={name: value for name, value in own.items() if value is not None})

    def follow(self, optimisation: OptimisationConfig) -> None:
        """Take another section's schedule and clip, and learning rate and warm-up unless it has its own."""
        self._optimisation = self._own(optimisation)
        self.optimizer.follow(self._optimisation)

    @property
    def body(self) -> nn.Module:
        """What computes hidden states."""
        return self._body

    def split_sequences(self, split: SequenceParallel) -> None:
        """Compute every row together with other ranks; before the weights are sharded."""
        with self._naming_its_section():
            split.install(self._body, attended_by_sequence)
        self._split = split

    def shard(self, ranks: Ranks) -> None:
        """Divide weights and gradients among ranks; before anything is trained or loaded.

        Raises:
            ModelError: the model cannot be divided so.
        """
        with self._naming_its_section():
            divide_layers(self._body, ranks)
        shard(self._body, ranks)
        # One output for each token: as exact as a policy's log-probabilities.
        shard(self._head.to(ranks.device), replace(ranks, precision=None))
        if self._stored is not None:
            self._stored.fill(self._body, ranks.home, ranks.device, self._path)
        if self._traits is not None:
            self._check_same(self._traits, ranks)
        self.optimizer = self._new_optimizer()

    @contextmanager
    def _naming_its_section(self) -> Iterator[None]:
        try:
            yield
        except ModelError as error:
            raise (ModelError(f"parallelism.critic: {error.detail}") if self._is_alone else error) from error

    @torch.no_grad()
    def _check_same(self, traits: Traits, ranks: Ranks) -> None:
        is_same = self._split is None or traits.can_pack
        if is_same:
            found = self._hidden(probe_input(self._body, ranks.device))
            is_same = agree(found, traits.hidden, ranks.compute_dtype or next(self._body.parameters()).dtype)
        if not is_same:
            raise ModelError(
                f"{type(self._body).__name__} computes something else when it is divided among ranks as "
                "parallelism.critic says: leave that out, or use its replicas alone"
            )

    def choose_attention(self, policy: Policy) -> None:
        """Let attention go sequence by sequence in packed rows where the policy's does; once weights are sharded."""
        if policy.attends_apart:
            dtype = self.ranks.compute_dtype or next(self._body.parameters()).dtype
            self.attends_apart = attends_apart(self._body, self._hidden, policy.device, dtype)

    def show_images(self, compute: Callable[..., Tensor]) -> None:
        """Take images; once weights are sharded.

        Args:
            compute: the body's last hidden states of rows that have some, and with what rows are split by.
        """
        # Only a forward method of the body's own gathers what belongs to none of its layers.
        self._body.shown_states = partial(compute, split=self._split)  # type: ignore[assignment]
        register_fsdp_forward_method(self._body, "shown_states")

    def _hidden(self, inputs: ModelInput) -> Tensor:
        return hidden_states(self._body, inputs, self._split).float()

    def _new_optimizer(self) -> PolicyOptimizer:
        return PolicyOptimizer(
            self._named_parameters(), self._optimisation, self._total_updates, is_offloaded=self._is_offloaded
        )

    def values(self, inputs: ModelInput) -> Tensor:
        """Predict the value of the state before each label: [N] float32, with gradient, whitened if the config says."""
        if inputs.images is None:
            hidden = hidden_states(self._body, inputs, self._split)
        else:
            hidden = self._body.shown_states(inputs)  # type: ignore[operator]
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, inputs.predictors)
        found: Tensor = self._head(chosen.float()).squeeze(-1)
        return found

    @torch.no_grad()
    def evaluate(self, like: Tensor, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Estimate the values of a whole batch: [T] like the given tensor, 0 where nothing was sampled."""
        found = torch.zeros_like(like)
        for micro in micro_batches:
            values = self.values(micro.inputs)
            if not micro.is_empty:
                found[micro.tokens] = micro.spread(self.moments.restore(values))
        return found

    def observe(self, returns: Tensor, response_mask: Tensor) -> None:
        """Note a batch's returns [T] before it is learned, if they are to be whitened."""
        if self.config.whiten_returns:
            self.moments = self.moments.updated(returns, response_mask)

    def accumulate(
        self, micro: MicroBatch, old_values: Tensor, returns: Tensor, denominators: Denominators, *, num_ranks: int
    ) -> Metrics:
        """Leave one micro-batch's gradient on the parameters.

        Args:
            micro: which tokens.
            old_values: [T] of the whole batch, before the step.
            returns: [T] of the whole batch.
            denominators: of the mini-batch.
            num_ranks: that share the mini-batch, whose gradients are averaged.
        """
        values = self.values(micro.inputs)
        if micro.is_empty:
            torch.autograd.backward(values.sum() * 0)
            self.optimizer.collect()
            return {}
        objective = value_objective(
            self.config,
            value_preds=micro.spread(values),
            old_values=self.moments.whiten(old_values[micro.tokens]),
            returns=self.moments.whiten(returns[micro.tokens]),
            sequences=micro.sequences,
            denominators=denominators,
        )
        torch.autograd.backward(objective.loss if num_ranks == 1 else objective.loss * num_ranks)
        self.optimizer.collect()
        return objective.metrics

    def update(self) -> UpdateResult:
        """Clip, step, and clear the gradients."""
        return self.optimizer.update()

    def state(self, *, with_optimizer: bool = True) -> dict[str, Tensor]:
        """Return weights and optimiser state as named tensors."""
        weights = {f"weight/{name}": parameter.detach() for name, parameter in self._named_parameters()}
        moments = {f"moments/{name}": getattr(self.moments, name) for name in MOMENTS}
        return weights | moments | (self.optimizer.state() if with_optimizer else {})

    def load(self, tensors: dict[str, Tensor], updates: int, *, with_optimizer: bool = True) -> None:
        """Load what ``state`` returned; without the optimiser moments of 0 begin.

        Raises:
            ModelError: the tensors are of another model.
        """
        weights = {name.removeprefix("weight/"): tensors[name] for name in tensors if name.startswith("weight/")}
        own = dict(self._named_parameters())
        if {name: value.shape for name, value in weights.items()} != {name: value.shape for name, value in own.items()}:
            raise ModelError("the checkpoint's critic is of another model")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(localized(weights[name], parameter))
        self.moments = ReturnMoments(*(tensors[f"moments/{name}"] for name in MOMENTS))
        rest = {name: value for name, value in tensors.items() if not name.startswith(("weight/", "moments/"))}
        self.optimizer.load(rest if with_optimizer else {}, updates)

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        head = [(HEAD + name, parameter) for name, parameter in self._head.named_parameters()]
        return [*self._body.named_parameters(), *head]


def make_critic(
    spec: ExperimentSpec, policy: LoadedModel, own: LoadedModel | None, total_updates: int, ranks: Ranks
) -> "Critic | None":
    """Make the critic of an experiment; None where no advantage needs values. Arguments as of ``Critic``.

    Its ranks are the policy's, unless the spec divides them otherwise.
    """
    if not spec.algorithm.needs_critic:
        return None
    section = spec.parallelism.critic
    is_alone = section is not None and ranks.is_several
    if section is not None and is_alone:
        ranks = ranks.reshaped(MeshShape.of(section, ranks.size))
    return Critic(
        policy,
        spec.algorithm.resolved_value_loss,
        spec.optimisation,
        total_updates,
        own=own,
        is_offloaded=spec.parallelism.offload.optimiser,
        ranks=ranks,
        is_alone=is_alone,
    )


@torch.no_grad()
def _take_head(own: LoadedModel, head: nn.Linear) -> None:
    """Let a reward model's scores be the first values; another model has no head for that."""
    scores = getattr(own.model, "score", None)
    if isinstance(scores, nn.Linear):
        for name, parameter in scores.named_parameters():
            whole = parameter if own.stored is None else own.stored.whole(f"score.{name}")
            head.get_parameter(name).copy_(whole)


def _width(body: nn.Module) -> int:
    config = getattr(body, "config", None)
    width = getattr(config.get_text_config() if config is not None else None, "hidden_size", None)
    if not isinstance(width, int):
        raise ModelError(
            f"{type(body).__name__} does not declare the width of its hidden states: no critic can be made"
        )
    return width
