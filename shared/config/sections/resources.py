"""What an experiment may take of a fleet that it shares with others."""

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from flotilla.shared.config.base.model import Config, DeviceCount

MEBIBYTE = 1024**2
GIBIBYTE = 1024**3


class QuotaConfig(Config):
    """How many services of one kind work for the experiment."""

    min: int = Field(1, ge=1)
    """The experiment starts when it can have this many, and other experiments never take these away."""
    max: int | None = Field(None, ge=1)
    """It never has more than this many. Null: no bound."""

    @model_validator(mode="after")
    def _max_is_not_below_min(self) -> Self:
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max {self.max} is below min {self.min}: raise max, set it to null, or lower min")
        return self

    @property
    def is_fixed(self) -> bool:
        """Whether no surplus can ever join."""
        return self.max == self.min


class RolloutQuotaConfig(QuotaConfig):
    """How many rollouts work for the experiment, and what each must have."""

    devices: DeviceCount = "auto"
    """GPUs that a rollout service must have: those of one engine. SGLang and vLLM divide the model among that many
    where their options do not say how; the embedded engine takes 1. auto: as many as the engine's device and options
    need, none on a CPU."""
    on_demand: int = Field(0, ge=0)
    """A floor of rollouts whose machines are not preemptible: whose FLOTILLA_POOL is neither spot nor
    begins with spot-. Until it has this many the experiment gets these first, and no other ever takes them away; while
    fewer are there, its problem says so. It starts all the same, with min of any kind."""

    @model_validator(mode="after")
    def _max_leaves_room_for_the_floor(self) -> Self:
        if self.max is not None and self.max < self.on_demand:
            raise ValueError(f"on_demand {self.on_demand} is above max {self.max}: raise max, or lower on_demand")
        return self


class TrainerQuotaConfig(Config):
    """What the trainer, of which there is always one, must have."""

    devices: DeviceCount = "auto"
    """GPUs that each trainer service must have: one for each of its ranks. parallelism.ranks is this many on each of
    parallelism.nodes where it is left out. auto: as many as parallelism needs, none on a CPU."""


class Sharing(StrEnum):
    """Whether trainer and rollouts have devices of their own."""

    NONE = "none"
    TIME = "time"


class LendingConfig(Config):
    """When the trainer's devices are lent: to rollouts of the pool ``lent`` on its host, while it waits for groups.

    These sample beside the rollouts that have devices of their own, hand over what is unfinished as soon as a step's
    groups are there, and free their memory. What lending costs and brings is measured from step to step.
    """

    when_waiting: float = Field(0.3, gt=0, lt=1)
    """Lend once the trainer waited for groups for at least this share of its time, and for longer in each step than it
    takes to get the devices back."""
    over_steps: int = Field(4, ge=2, le=64)
    """Steps that are examined before anything is lent, and then with it: where they are no shorter, nothing is lent
    for four times as many."""


class ResourcesConfig(Config):
    """Quotas. The trainer is always one, and always stays.

    Beyond the minimums of all experiments, services of each kind are surplus: they are shared among the experiments
    that run, by weight, and given back (drained, with a notice) when an experiment needs them for its minimum.
    """

    trainer: TrainerQuotaConfig = TrainerQuotaConfig()
    """The trainer service."""
    rollouts: RolloutQuotaConfig = RolloutQuotaConfig()
    """Rollout services."""
    rewards: QuotaConfig = QuotaConfig()
    """Reward services."""
    sandboxes: QuotaConfig | None = None
    """Sandbox services. Null: exactly one where a reward component runs code, else none."""
    sharing: Sharing = Sharing.NONE
    """none: trainer and rollouts compute side by side, and each has its memory all the time. time: they take turns on
    the same devices. While rollouts sample, the trainer's weights and optimiser are in the host's memory (on a CPU: in
    a file); while it trains, the engines have no weights and no KV cache. For an engine that can sleep."""
    lending: LendingConfig | None = None
    """The trainer's devices are lent to rollouts of the pool ``lent`` while it waits; null: they never are. For the
    embedded engine, on one host."""
    weight: float = Field(1.0, gt=0, le=1000)
    """Share of the surplus: an experiment of weight 2 gets twice as much of it as one of weight 1."""
    priority: int = Field(0, ge=-100, le=100)
    """Experiments of a higher priority start first, and get all the surplus that they can use before lower ones get
    any. Minimums of running experiments are never touched."""
    stream_bytes: int = Field(4 * GIBIBYTE, ge=MEBIBYTE)
    """Bound on each of the experiment's streams in the Redis server's memory, by its own estimate: while a stream
    takes more, nothing is issued, and nothing is claimed that would be forwarded to it. The groups of one step must
    fit; where those of the steps since the last checkpoint leave no room for them, the next one is made early."""

    @property
    def turns(self) -> str | None:
        """By which key the trainer takes turns with rollouts on its devices; None: it has them all the time."""
        if self.sharing is Sharing.TIME:
            return "resources.sharing time"
        return None if self.lending is None else "resources.lending"

    @model_validator(mode="after")
    def _all_rollouts_take_turns_or_some(self) -> Self:
        if self.sharing is Sharing.TIME and self.lending is not None:
            raise ValueError(
                "resources.lending lends the trainer's devices to rollouts beside others, and with resources.sharing "
                "time all rollouts compute on them: leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _weight_has_something_to_share(self) -> Self:
        is_fixed = self.rollouts.is_fixed and self.rewards.is_fixed and (not self.sandboxes or self.sandboxes.is_fixed)
        if self.weight != 1.0 and is_fixed:
            raise ValueError(
                f"resources.weight {self.weight:g} has no effect while every max equals its min, since there is no "
                "surplus to share: raise resources.rollouts.max, or leave weight at 1"
            )
        return self
