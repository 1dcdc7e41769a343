"""How many tokens a forward pass may have: what the spec says, or as many as memory holds.

    an estimate for the first step -> that step's first mini-batch is measured -> the bound of all later steps
    -> half of it where a pass does not fit into the device's memory after all

A bound is written down before it is used, with the work that it is first used for: a replay of a step cuts
it as it was cut. All ranks have the same bounds.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from flotilla.services.trainer.algorithms.log_probs import CHUNK_TOKENS
from flotilla.services.trainer.data.micro_batch import MicroBatch
from flotilla.services.trainer.models.log_probs import Policy
from flotilla.services.trainer.models.memory import free_bytes, measured_peak
from flotilla.services.trainer.models.optimizer import PolicyOptimizer
from flotilla.services.trainer.parallel.ranks import Ranks
from flotilla.shared.config.sections.job import SftConfig
from flotilla.shared.config.spec import ExperimentSpec

log = logging.getLogger(__name__)

T = TypeVar("T")
Cut = Callable[[int], list[MicroBatch]]
"""Cuts some sequences into passes of at most so many tokens."""

RECORD = "micro_batches.json"
"""File of an experiment's directory."""
ESTIMATED, MEASURED, HALVED = "estimated", "measured", "halved"
MOST_TOKENS = {"cpu": 8192, "cuda": 131_072}
"""Beyond these a pass is not computed faster."""
LEAST_TOKENS = 256
ROUND_TOKENS = 256
USED_SHARE = {"cpu": 0.5, "cuda": 0.8}
"""Of the free memory; others on a host take some of its memory meanwhile."""
LEAST_MEASURED = 1024
"""Positions of a pass that is measured: what a first pass sets up for good would be taken for theirs."""
BELIEVED = (0.25, 4.0)
"""Measured sizes, in estimated ones: memory that was freed before is used first, and not seen to be taken."""


@dataclass(frozen=True)
class Bound:
    """Tokens of a pass.

    Attributes:
        step, work: the first that it is used for: a step, and a number of its pieces of work in turn, from 0.
        tokens: at most.
        why: estimated, measured, or halved.
    """

    step: int
    work: int
    tokens: int
    why: str


@dataclass(frozen=True)
class Need:
    """What passes take of a device's memory, in bytes.

    Attributes:
        device: that computes.
        per_token: of a token with its gradient, by an estimate.
        fixed: of a pass, however small.
        gradients: of the trained weights; they are not there between two updates.
        moments: returns those of the optimiser that are not there yet.
    """

    device: torch.device
    per_token: float
    fixed: int
    gradients: int
    moments: Callable[[], int]


class PassSizes:
    """The bounds of one learner.

    Args:
        spec: the experiment.
        ranks: of the job.
        need: what passes take.
    """

    def __init__(self, spec: ExperimentSpec, ranks: Ranks, need: Need) -> None:
        setting = spec.optimisation.micro_batch_tokens
        self._fixed = None if setting == "auto" else setting
        self._device, self._ranks, self._need = need.device, ranks, need
        # Ranks of one host have its memory together.
        self._sharers = max(1, ranks.size // spec.parallelism.nodes) if need.device.type == "cpu" else 1
        self._bounds: tuple[Bound, ...] = ()
        self._path: Path | None = None
        self._step = self._work = 0
        self._measured: float | None = None
        self._has_trained = False

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """All of them, in the order of the work."""
        return self._bounds

    @property
    def path(self) -> Path | None:
        """Where they are written down."""
        return self._path

    @property
    def directory(self) -> Path | None:
        """The experiment's directory, in which they are; None where nothing is kept, as of a step that is replayed."""
        return None if self._path is None else self._path.parent

    def keep(self, directory: Path) -> None:
        """Take up what is written in an experiment's directory, and write down there what is decided."""
        self.load(directory)
        self._path = directory / RECORD

    def load(self, directory: Path) -> None:
        """Take up what is written in an experiment's directory; nothing if nothing is."""
        path = directory / RECORD
        try:
            self._bounds = tuple(Bound(**each) for each in json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError) as error:
            log.warning("bounds of micro-batches cannot be read", extra={"path": str(path), "error": repr(error)})

    def follow(self, bounds: Sequence[Bound], path: Path | None) -> None:
        """Use those of the leader, which has them in a file."""
        self._bounds, self._path = tuple(bounds), path

    def begin(self, step: int) -> None:
        """Begin a step's work; every rank does it at once."""
        self._step, self._work = step, -1
        if self._fixed is not None or self._is_settled:
            return
        if self._has_trained or not any(each.step <= step for each in self._bounds):
            told = self._ranks.gather(str(self._chosen()).encode())
            self._add(Bound(step, 0, min(map(int, told)), MEASURED if self._has_trained else ESTIMATED))

    def fit(
        self,
        cut: Cut,
        work: Callable[[list[MicroBatch]], T],
        undo: Callable[[], None] | None = None,
    ) -> T:
        """Do some passes, and again in smaller ones where they do not fit into the device's memory.

        Args:
            cut: into passes of at most so many tokens.
            work: what is done with them.
            undo: forgets what a part of it has left; passes without a gradient leave nothing, and have none.

        Raises:
            torch.OutOfMemoryError: smaller passes are impossible, or other ranks wait for this one's: then the smaller
                bound is written down, for the trainer that continues.
        """
        self._work += 1
        while True:
            tokens = self._tokens()
            passes = cut(tokens)
            try:
                return work(passes) if undo is None or not self._measures else self._measure(passes, work)
            except torch.OutOfMemoryError as error:
                if max((len(each.layout.members) for each in passes), default=0) < 2 or tokens <= LEAST_TOKENS:
                    raise
                self._halve(tokens, str(error).partition("\n")[0])
                if self._ranks.is_several:
                    raise
            # Not in the handler, where the error keeps alive what did not fit.
            if undo is not None:
                undo()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    @property
    def _is_settled(self) -> bool:
        return any(each.why == MEASURED for each in self._bounds)

    @property
    def _measures(self) -> bool:
        return self._fixed is None and not self._has_trained and not self._is_settled

    def _tokens(self) -> int:
        """Return the bound of the present work."""
        known = [each.tokens for each in self._bounds if (each.step, each.work) <= (self._step, self._work)]
        if self._fixed is not None:
            return min([self._fixed, *known[-1:]])
        if not known:
            # A loss is measured before anything is trained.
            work = self._work
            self.begin(self._step)
            self._work = work
            return self._bounds[0].tokens
        return known[-1]

    def _measure(self, passes: list[MicroBatch], work: Callable[[list[MicroBatch]], T]) -> T:
        with measured_peak(self._device) as peak:
            result = work(passes)
        self._has_trained = True
        positions = max((each.layout.positions for each in passes if not each.is_empty), default=0)
        if peak.num_bytes is not None and positions >= LEAST_MEASURED:
            found = (peak.num_bytes - self._need.gradients - self._need.fixed) / positions
            least, most = (share * self._need.per_token for share in BELIEVED)
            self._measured = min(max(found, least), most)
        return result

    def _halve(self, tokens: int, told: str) -> None:
        log.warning(
            "a pass does not fit into the device's memory: passes have half as many tokens from here on",
            extra={"step": self._step, "tokens": tokens // 2, "before": tokens, "error": told},
        )
        self._add(Bound(self._step, self._work, tokens // 2, HALVED))

    def _chosen(self) -> int:
        free = free_bytes(self._device) * USED_SHARE[self._device.type] / self._sharers
        room = free - self._need.gradients - self._need.moments() - self._need.fixed
        tokens = int(room / (self._measured or self._need.per_token)) // ROUND_TOKENS * ROUND_TOKENS
        tried = [each.tokens for each in self._bounds if each.why == HALVED]
        return min([max(tokens, LEAST_TOKENS), MOST_TOKENS[self._device.type], *tried])

    def _add(self, bound: Bound) -> None:
        self._bounds = tuple(sorted([*self._bounds, bound], key=lambda each: (each.step, each.work)))
        log.info("bound of a forward pass", extra=asdict(bound))
        if self._path is None:
            return
        unfinished = self._path.with_name(f"{self._path.name}.part")
        try:
            unfinished.write_text(json.dumps([asdict(each) for each in self._bounds]), encoding="utf-8")
            unfinished.replace(self._path)
        except OSError as error:
            log.warning("bounds of micro-batches cannot be kept", extra={"error": repr(error)})


def need_of(policy: Policy, optimizers: Sequence[PolicyOptimizer], spec: ExperimentSpec, ranks: Ranks) -> Need:
    """Estimate what passes of a model take, beside all that updates something."""
    recomputes, on_host = spec.optimisation.activation_checkpointing, ranks.offloads_parameters
    config = policy.model.config.get_text_config()
    size = next(policy.model.parameters()).element_size()
    vocabulary = int(policy.model.get_input_embeddings().num_embeddings)
    of_layer = layer_elements(config)
    # The layer whose backward pass is under way has as much again.
    kept = (policy.hidden_size if recomputes else of_layer) * int(config.num_hidden_layers) + 2 * of_layer
    head = 0 if policy.has_plain_head else vocabulary * (size + 8)
    is_taught = isinstance(spec.job, SftConfig) and spec.job.distillation is not None
    if is_taught:
        # The teacher's logits of all tokens; and of a chunk both distributions, and what their divergence is made of.
        head += 4 * vocabulary
    of_chunk = 12 * (3 if is_taught else 1)
    return Need(
        device=policy.device,
        per_token=float(kept * size + head),
        fixed=of_chunk * vocabulary * CHUNK_TOKENS if policy.has_plain_head else 0,
        gradients=0 if on_host else sum(each.gradient_bytes for each in optimizers),
        moments=lambda: 0 if on_host else sum(each.missing_moment_bytes for each in optimizers),
    )


def layer_elements(config: Any) -> int:
    """Count what a decoder layer keeps of a token for its backward pass, by its shape."""
    hidden = int(config.hidden_size)
    heads = int(config.num_attention_heads)
    width = int(getattr(config, "head_dim", None) or hidden // heads)
    queries = heads * width
    keys = int(getattr(config, "num_key_value_heads", None) or heads) * width
    inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    if chosen := getattr(config, "num_experts_per_tok", None):
        inner = max(inner, int(chosen) * int(getattr(config, "moe_intermediate_size", None) or inner))
    return 6 * hidden + 3 * queries + 4 * keys + 4 * inner
