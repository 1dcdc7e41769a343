"""What is simulated: groups, what parts of a fleet cost, its settings, and what came of it. Typed facts."""

import math
from dataclasses import dataclass

from flotilla.services.gateway.monitoring.bottleneck import Bottleneck
from flotilla.shared.streams.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Work:
    """What a group takes.

    Attributes:
        lengths: tokens of each answer.
        grading_seconds: until its grade is there, once somebody grades it.
        train_tokens: tokens that the trainer computes, prompts among them.
        is_kept: whether it is trained, and not filtered once it is graded.
    """

    lengths: tuple[int, ...]
    grading_seconds: float
    train_tokens: int
    is_kept: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """How long parts take that have the cores they can use, in seconds.

    Attributes:
        tick: one step of an engine, however many answers run.
        row: of it, for each running answer.
        update: one step of the trainer, however many tokens.
        token: of it, for each token.
        claim: from a group's issue until its engine has it.
        forward: between sampling and grading, and after it.
        pickup: from the last grade that a step needs until it computes.
        publish: of the trainer's, for each publication.
        publication: from the end of training a version until the gateway has committed it.
        switch: then until the engines serve it.
        overhead: of the trainer's, for each step: checkpoints, and what lies between its parts.
        engine_cores, trainer_cores: that each takes while it computes, if it can have them.
    """

    tick: float
    row: float
    update: float
    token: float
    claim: float = 0.0
    forward: float = 0.0
    pickup: float = 0.0
    publish: float = 0.0
    publication: float = 0.0
    switch: float = 0.0
    overhead: float = 0.0
    engine_cores: float = 0.0
    trainer_cores: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Settings and size of a fleet.

    Attributes:
        cores: that all rollouts and the trainer share.
        graders: groups that are graded at the same time.
        max_lag: in versions; None: no bound.
        paces: whether the trainer waits for groups that would become too old, and does not drop them.
        drains: whether running answers end before an engine takes a version.
    """

    rollouts: int
    slots: int
    groups_per_step: int
    steps_per_version: int
    budget: int
    cores: float = math.inf
    graders: int = 64
    max_lag: int | None = None
    paces: bool = True
    drains: bool = False


@dataclass(frozen=True, slots=True)
class Simulated:
    """Means over the simulated steps, after those of the beginning.

    Attributes:
        step_seconds: from one step's end to the next one's.
        tokens_per_second: trained answers' tokens.
        lag: of a trained token, in versions.
        wait, compute: of the trainer, seconds per step.
        generation: of a group, in seconds.
        rollouts_idle: share of the time in which a rollout had no group.
        engine_cores: that an engine took while it computed.
        binds: what bounds the speed, as the diagnosis of a running experiment says it.
        ledger: at the end.
    """

    step_seconds: float
    tokens_per_second: float
    lag: float
    wait: float
    compute: float
    generation: float
    rollouts_idle: float
    engine_cores: float
    binds: Bottleneck
    ledger: Ledger
