"""The arithmetic of batches: prompts, samples, passes, updates and tokens of a step, at the most. Pure."""

import math
from dataclasses import dataclass

from flotilla.shared.config.sections.job import PreferenceConfig, RewardModelJobConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.sizes.passes import PassSizes


@dataclass(frozen=True, slots=True)
class StepArithmetic:
    """What a step has where all samples are as long as the spec lets them be.

    Attributes:
        prompts: groups of a step.
        group_size: samples of a prompt.
        mini_batches: optimiser updates of an epoch.
        epochs: passes over a step's groups.
        prompt_tokens, sampled_tokens: of a sample, at most. Rows with finished answers may learn every token, and
            have no prompt here.
        shares: parts of the samples, one for each rank or ranks that compute the same sequences.
        is_bounded: the spec bounds the length of a sample; else its numbers of tokens are 0.
    """

    prompts: int
    group_size: int
    mini_batches: int
    epochs: int
    prompt_tokens: int
    sampled_tokens: int
    shares: int
    is_bounded: bool = True

    @property
    def samples(self) -> int:
        """Of a step."""
        return self.prompts * self.group_size

    @property
    def updates(self) -> int:
        """Of a step."""
        return self.mini_batches * self.epochs

    @property
    def tokens(self) -> int:
        """Of a step, a prompt counted for each of its samples."""
        return self.samples * self.sample_tokens

    @property
    def sample_tokens(self) -> int:
        """Of a sample."""
        return self.prompt_tokens + self.sampled_tokens

    @property
    def samples_of_rank(self) -> int:
        """Samples of a mini-batch that one share has."""
        return math.ceil(self.samples / self.mini_batches / self.shares)

    def largest_pass(self, bound: int, *, shares_prompts: bool = True) -> PassSizes:
        """Fill a pass of at most so many positions with samples of the largest length.

        A prompt stands once before the answers to it that are in the pass, where rows are packed. Samples of any
        length are taken to be as long as the bound.
        """
        if not self.is_bounded:
            return PassSizes(bound, bound, bound, 1)
        group = min(self.group_size, self.samples_of_rank)
        if not shares_prompts:
            num = min(max(1, bound // self.sample_tokens), self.samples_of_rank)
            return PassSizes(num * self.sample_tokens, num * self.sample_tokens, num * self.sampled_tokens, num)
        num, positions = 0, 0
        while num < self.samples_of_rank:
            added = self.sampled_tokens + (self.prompt_tokens if num % group == 0 else 0)
            if num and positions + added > bound:
                break
            num, positions = num + 1, positions + added
        return PassSizes(positions, num * self.sample_tokens, num * self.sampled_tokens, num)

    def passes(self, taken: PassSizes) -> int:
        """Passes of one update, on each rank."""
        return math.ceil(self.samples_of_rank / taken.sequences)


def arithmetic_of(spec: ExperimentSpec) -> StepArithmetic:
    """Read the arithmetic of a spec."""
    job, parallelism = spec.finished_job, spec.parallelism
    if job is None:
        group_size, (prompt, sampled) = spec.rollout.group_size, sampled_lengths(spec)
    else:
        group_size = 2 if isinstance(job, PreferenceConfig | RewardModelJobConfig) else 1
        prompt, sampled = 0, job.max_tokens or 0
    together = parallelism.tensor_parallel * parallelism.sequence_parallel
    return StepArithmetic(
        prompts=spec.groups_per_step,
        group_size=group_size,
        mini_batches=spec.asynchrony.require_batches,
        epochs=spec.optimisation.epochs_per_step,
        prompt_tokens=prompt,
        sampled_tokens=sampled,
        shares=max(1, parallelism.ranks // together),
        is_bounded=sampled > 0,
    )


def sampled_lengths(spec: ExperimentSpec) -> tuple[int, int]:
    """Count the tokens of a prompt and of the answer that a rollout gives to it, at most."""
    context = spec.rollout.engine.context_tokens
    sampled = min(spec.rollout.sampling.max_new_tokens, context - 1)
    return max(1, min(spec.max_prompt_tokens, context - sampled)), sampled
