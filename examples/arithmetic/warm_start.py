"""Two short supervised phases that leave a model able to work problems out, and mostly not doing it.

Phase 1 shows worked solutions, with a few bare guesses among them, until the model samples a worked one right often
enough. Phase 2 shows mostly guesses, until greedy answers are right only as often as asked.

Progress is measured without sampling. A problem has one worked solution and one right bare answer, so the probability
that the model answers right at temperature 1 is the sum of what it gives to these two texts, and greedy decoding is
right where every token of one of them is the likeliest. Both are lower bounds, tight up to right answers by wrong
working.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from .problems import Problem, guess_near, terse_answer, training_problems, worked_solution
from .settings import ProblemSettings, WarmStartSettings
from .tokenizer import completion_ids, prompt_ids

Report = Callable[[str], None]

WARMUP_STEPS = 20
WEAK_STEPS_BETWEEN_PROBES = 4
FAR_FROM_WINDOW = 0.1
"""An exact probe would find a rate on the same side of the window that a rough one finds this far outside."""


@dataclass(frozen=True)
class Demonstrations:
    """Prompts with one completion each, right-padded: attention is causal, so the padding needs no mask."""

    input_ids: Tensor
    """[B, T] int64."""
    is_completion: Tensor
    """[B, T - 1] bool, True where the next token belongs to the completion."""

    @property
    def targets(self) -> Tensor:
        """[N] int64, the completions' tokens, one sequence after the other."""
        return self.input_ids[:, 1:][self.is_completion]

    @property
    def owner(self) -> Tensor:
        """[N] int64, the sequence that each target belongs to."""
        return self.is_completion.nonzero()[:, 0]


@dataclass(frozen=True)
class PassRate:
    """How often the model answers right."""

    sampled: float
    greedy: float
    worked: float
    """How often it begins to work the problem out, when sampling."""


def collate(prompts: list[list[int]], completions: list[list[int]], pad_id: int) -> Demonstrations:
    """Pad prompts with their completions into one batch."""
    length = max(len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True))
    input_ids = torch.full((len(prompts), length), pad_id)
    is_completion = torch.zeros((len(prompts), length - 1), dtype=torch.bool)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        end = len(prompt) + len(completion)
        input_ids[row, :end] = torch.tensor(prompt + completion)
        is_completion[row, len(prompt) - 1 : end - 1] = True
    return Demonstrations(input_ids, is_completion)


def completion_logits(model: Qwen3ForCausalLM, batch: Demonstrations) -> Tensor:
    """Compute the logits [N, V] that predict ``batch.targets``, and no others.

    Past its attention the last layer is computed where a target follows: that is two fifths of the tokens.
    """
    body = model.model
    *layers, last = body.layers
    hidden = body.embed_tokens(batch.input_ids)
    rotation = body.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
    for layer in layers:
        hidden = layer(hidden, position_embeddings=rotation)
    attended, _ = last.self_attn(last.input_layernorm(hidden), position_embeddings=rotation, attention_mask=None)
    hidden = (hidden + attended)[:, :-1][batch.is_completion]
    hidden = hidden + last.mlp(last.post_attention_layernorm(hidden))
    logits: Tensor = model.lm_head(body.norm(hidden))
    return logits


def probabilities(target_log_probs: Tensor, owner: Tensor, count: int) -> Tensor:
    """Multiply tokens' probabilities into those [count] of whole completions."""
    return torch.zeros(count).index_add_(0, owner, target_log_probs).exp()


class Probe:
    """A fixed set of training problems on which the pass rate is computed."""

    def __init__(self, problems: list[Problem], tokenizer: PreTrainedTokenizerFast) -> None:
        prompts = prompt_ids(tokenizer, [problem.prompt for problem in problems])
        worked = completion_ids(tokenizer, [worked_solution(problem) for problem in problems])
        terse = completion_ids(tokenizer, [terse_answer(problem.answer) for problem in problems])
        self._worked = collate(prompts, worked, tokenizer.pad_token_id)
        self._terse = collate(prompts, terse, tokenizer.pad_token_id)
        self._terse_start = terse[0][0]
        self._first = torch.tensor([0, *torch.tensor([len(ids) for ids in worked]).cumsum(0)[:-1].tolist()])
        self._count = len(problems)

    @torch.no_grad()
    def measure(self, model: Qwen3ForCausalLM) -> PassRate:
        """Compute the rates; they are the model's own, free of sampling noise."""
        sampled, greedy = torch.zeros(self._count), torch.zeros(self._count)
        guesses = torch.zeros(self._count)
        for batch in (self._worked, self._terse):
            logits = completion_logits(model, batch)
            log_probs = -functional.cross_entropy(logits, batch.targets, reduction="none")
            sampled += probabilities(log_probs, batch.owner, self._count)
            misses = (logits.argmax(-1) != batch.targets).float()
            greedy += (torch.zeros(self._count).index_add_(0, batch.owner, misses) == 0).float()
            if batch is self._worked:
                guesses = logits[self._first].softmax(-1)[:, self._terse_start]
        return PassRate(sampled.mean().item(), greedy.mean().item(), 1 - guesses.mean().item())


class WarmStart:
    """One model's supervised training on demonstrations that it draws itself."""

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        tokenizer: PreTrainedTokenizerFast,
        problems: ProblemSettings,
        settings: WarmStartSettings,
        seed: int,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._settings = settings
        self._rng = random.Random(f"demonstrations {seed}")
        self._source = training_problems(problems, self._rng)
        self._first = training_problems(settings.first_problems or problems, self._rng)
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True
        )

    def _draw(self, worked_share: float, source: Iterator[Problem]) -> tuple[Demonstrations, Tensor]:
        """Draw one batch; also tells [B] bool which of it show their working."""
        problems = list(islice(source, self._settings.batch_size))
        is_worked = [self._rng.random() < worked_share for _ in problems]
        texts = [
            worked_solution(problem) if worked else terse_answer(self._guess(problem))
            for problem, worked in zip(problems, is_worked, strict=True)
        ]
        prompts = prompt_ids(self._tokenizer, [problem.prompt for problem in problems])
        completions = completion_ids(self._tokenizer, texts)
        return collate(prompts, completions, self._tokenizer.pad_token_id), torch.tensor(is_worked)

    def _guess(self, problem: Problem) -> int:
        return guess_near(problem, self._settings.guess_error, self._rng)

    def _step(self, batch: Demonstrations, learning_rate: float) -> Tensor:
        """Train on one batch; returns the probability [B] of each completion before the update."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        log_probs = -functional.cross_entropy(completion_logits(self._model, batch), batch.targets, reduction="none")
        loss: Tensor = -log_probs.mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return probabilities(log_probs.detach(), batch.owner, len(batch.input_ids))

    def learn_to_work(self, report: Report) -> tuple[int, float]:
        """Phase 1: mostly worked solutions, until they are sampled right; returns the steps and how often they are.

        It begins with the first problems: how to copy a number and to count on from it is found sooner, and in shorter
        sequences, where there is less else.
        """
        settings = self._settings
        step = self._learn_first(report) if settings.first_problems is not None else 0
        recent: deque[float] = deque(maxlen=640)
        rate, learning_rate = 0.0, settings.learning_rate
        remaining, is_settling = settings.settle_steps, False
        while remaining > 0:
            step += 1
            is_enough = len(recent) == recent.maxlen and rate >= settings.stop_pass_rate
            is_settling = is_settling or is_enough or step >= settings.max_steps
            if is_settling:
                remaining -= 1
                done = 1 - remaining / settings.settle_steps
                learning_rate = settings.learning_rate + done * (settings.weak_learning_rate - settings.learning_rate)
            recent.extend(self._work(self._source, learning_rate * min(1.0, step / WARMUP_STEPS)))
            rate = sum(recent) / len(recent) / settings.worked_share
            report(
                f"phase 1, learning to work it out: step {step}, right {rate:.0%}, until {settings.stop_pass_rate:.0%}"
            )
        return step, rate

    def _learn_first(self, report: Report) -> int:
        """Train on the first problems until worked solutions are sampled right often enough; return the steps."""
        settings = self._settings
        recent: deque[float] = deque(maxlen=320)
        step, rate = 0, 0.0
        while step < settings.max_steps and (len(recent) < 320 or rate < settings.first_pass_rate):
            step += 1
            recent.extend(self._work(self._first, settings.learning_rate * min(1.0, step / WARMUP_STEPS)))
            rate = sum(recent) / len(recent) / settings.worked_share
            report(f"phase 1, with one operation: step {step}, right {rate:.0%}, until {settings.first_pass_rate:.0%}")
        return step

    def _work(self, source: Iterator[Problem], learning_rate: float) -> list[float]:
        """Train on one batch of phase 1; return the probability of each worked solution before the update."""
        batch, is_worked = self._draw(self._settings.worked_share, source)
        found: list[float] = self._step(batch, learning_rate)[is_worked].tolist()
        return found

    def learn_to_guess(self, rough: Probe, exact: Probe, report: Report) -> tuple[int, PassRate]:
        """Phase 2: more guesses, until answers are right as often as asked; returns the steps and the rates.

        When guessing has gone too far, worked solutions get the upper hand again. The learning rate is halved at each
        such turn, down to a quarter, so that the pinned rate comes to rest within its window.

        Args:
            rough: a few problems, which tell where the rate is as long as it is far from the window.
            exact: more problems, which decide.
        """
        settings = self._settings
        lower, upper = settings.pinned_window
        rate, step, learning_rate, was_above = self._probed(rough, exact), 0, settings.weak_learning_rate, True
        while step < settings.max_weak_steps:
            pinned = self._pinned(rate)
            if lower <= pinned <= upper:
                break
            is_above = pinned > upper
            if is_above != was_above:
                learning_rate, was_above = max(learning_rate / 2, settings.weak_learning_rate / 4), is_above
            for _ in range(WEAK_STEPS_BETWEEN_PROBES):
                share = settings.weak_worked_share if is_above else settings.worked_share
                self._step(self._draw(share, self._source)[0], learning_rate)
            step += WEAK_STEPS_BETWEEN_PROBES
            rate = self._probed(rough, exact)
            report(
                f"phase 2, learning bad habits: step {step}, works out {rate.worked:.0%} of its answers, "
                f"right {rate.sampled:.0%} (sampled), {rate.greedy:.0%} (greedy)"
            )
        return step, rate

    def _probed(self, rough: Probe, exact: Probe) -> PassRate:
        rate = rough.measure(self._model)
        lower, upper = self._settings.pinned_window
        is_far = not lower - FAR_FROM_WINDOW <= self._pinned(rate) <= upper + FAR_FROM_WINDOW
        return rate if is_far else exact.measure(self._model)

    def _pinned(self, rate: PassRate) -> float:
        return rate.greedy if self._settings.pinned == "greedy" else rate.sampled
