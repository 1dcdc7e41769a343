"""Builds the directory: problems, tokenizer, model, and a start that knows the calculator and rarely uses it."""

import json
import random
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from examples.arithmetic.building import write_rows
from examples.arithmetic.model import build_model
from examples.arithmetic.problems import Problem, heldout_set, terse_answer, training_problems, training_set

from .conversations import SCHEMA, Demonstrations, call_of
from .settings import Settings
from .tokenizer import build_tokenizer

Report = Callable[[str], None]
PROBE_SIZE = 128
STEPS_BETWEEN_PROBES = 25
WEAK_STEPS_BETWEEN_PROBES = 2


class Learner:
    """One model's supervised training on demonstrations that are drawn as they are needed."""

    def __init__(self, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: Settings) -> None:
        self._model, self._settings = model, settings.warm_start
        self._rng = random.Random(f"demonstrations {settings.seed}")
        self._source = training_problems(settings.problems, self._rng)
        self._written = Demonstrations(tokenizer, self._settings.guess_error, self._rng)
        rate = self._settings.learning_rate
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True
        )

    def step(self, call_share: float, learning_rate: float) -> float:
        """Train on one batch; returns the loss."""
        problems = islice(self._source, self._settings.batch_size)
        written = [
            self._written.with_call(each) if self._rng.random() < call_share else self._written.guess(each)
            for each in problems
        ]
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        log_probs, _ = self._log_probs(*self._written.batch(written))
        loss = -log_probs.mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    @torch.no_grad()
    def probe(self, problems: list[Problem]) -> tuple[float, float]:
        """Compute how likely a call is, and how likely the rest of its conversation is then: call and answer."""
        input_ids, is_said = self._written.batch([self._written.with_call(each) for each in problems])
        log_probs, owner = self._log_probs(input_ids, is_said)
        first = torch.cat([torch.tensor([True]), owner[1:] != owner[:-1]])
        rest = torch.zeros(len(problems)).index_add_(0, owner, torch.where(first, 0.0, log_probs))
        return log_probs[first].exp().mean().item(), rest.exp().mean().item()

    def _log_probs(self, input_ids: Tensor, is_said: Tensor) -> tuple[Tensor, Tensor]:
        """Compute log-probabilities [N] of the tokens that the model says, and to which row [N] each belongs."""
        hidden = self._model.model(input_ids=input_ids, use_cache=False).last_hidden_state
        chosen = is_said[:, 1:]
        logits = self._model.lm_head(hidden[:, :-1][chosen])
        return -functional.cross_entropy(logits, input_ids[:, 1:][chosen], reduction="none"), chosen.nonzero()[:, 0]


def warm_start(learner: Learner, probe: list[Problem], settings: Settings, report: Report) -> dict[str, float]:
    """Learn to use the calculator, then to guess, until calls are as rare as the settings say."""
    own = settings.warm_start
    steps, skill, calls = 0, 0.0, 1.0
    while steps < own.max_steps and skill < own.stop_skill:
        for _ in range(STEPS_BETWEEN_PROBES):
            steps += 1
            loss = learner.step(own.call_share, own.learning_rate * min(1.0, steps / 20))
        calls, skill = learner.probe(probe)
        report(f"phase 1, learning to use the calculator: step {steps}, loss {loss:.3f}, done right {skill:.0%}")
    weak_steps, rate, was_above = 0, own.weak_learning_rate, True
    lower, upper = own.call_window
    while not lower <= calls <= upper and weak_steps < own.max_weak_steps:
        is_above = calls > upper
        if is_above != was_above:
            rate, was_above = max(rate / 2, own.weak_learning_rate / 4), is_above
        for _ in range(WEAK_STEPS_BETWEEN_PROBES):
            learner.step(own.weak_call_share if is_above else own.call_share, rate)
        weak_steps += WEAK_STEPS_BETWEEN_PROBES
        calls, skill = learner.probe(probe)
        report(f"phase 2, learning to guess: step {weak_steps}, calls {calls:.0%}, then right {skill:.0%}")
    return {"steps": steps, "weak_steps": weak_steps, "calls": calls, "skill": skill}


def build(directory: Path, settings: Settings, say: Report, report: Report) -> dict[str, object]:
    """Fill ``directory``; returns what was made and measured.

    Args:
        say: writes a line of progress now.
        report: writes one if the last is old enough.
    """
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    rng = random.Random(f"problems {settings.seed}")
    training = training_set(settings.num_train, settings.problems, rng)
    heldout = heldout_set(settings.num_heldout, settings.problems, rng)
    write_rows(directory / "train.jsonl", training)
    write_rows(directory / "heldout.jsonl", heldout)
    texts = [json.dumps(SCHEMA), *(text for p in training[:2000] for text in (p.prompt, call_of(p), terse_answer(1)))]
    tokenizer = build_tokenizer(texts, settings.model.vocab_size)
    model = build_model(settings.model, tokenizer, settings.seed)
    say(f"tokenizer of {len(tokenizer)} entries, model of {model.num_parameters()} parameters")
    learner = Learner(model, tokenizer, settings)
    found = warm_start(learner, heldout[:PROBE_SIZE], settings, report)
    say(f"calls the calculator in {found['calls']:.0%} of its answers, and is then right in {found['skill']:.0%}")
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    return {
        "num_parameters": model.num_parameters(),
        "vocab_size": len(tokenizer),
        "model": asdict(settings.model),
        "warm_start": found,
    }
