"""Builds the directory's contents: problems, tokenizer, model, warm start, and the measurement of where it starts."""

import re
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from .model import build_model
from .problems import Problem, terse_answer, worked_solution
from .rows import write_problems
from .settings import Settings
from .tokenizer import build_tokenizer, prompt_ids
from .warm_start import Probe, Report, WarmStart

PROBE_SIZE = 512
ROUGH_PROBE_SIZE = 128


def final_answer(completion: str) -> str | None:
    """Read the number after the last ``####``; None where there is none."""
    found: list[str] = re.findall(r"####\s*(-?\d+)", completion)
    return found[-1] if found else None


@dataclass(frozen=True)
class Accuracy:
    """What generating one answer per problem gave."""

    right: float
    """Share of the problems whose final answer is right."""
    tokens: float
    """Mean length of an answer, with the token that ends it."""


@torch.no_grad()
def measure(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[Problem],
    *,
    max_new_tokens: int,
    is_greedy: bool,
    report: Report,
) -> Accuracy:
    """Generate one answer per problem, greedily or at temperature 1, and grade it by its final number."""
    report(f"answering {len(problems)} held-out problems")
    prompts = tokenizer.pad({"input_ids": prompt_ids(tokenizer, [p.prompt for p in problems])}, return_tensors="pt")
    # All at once: a token costs so small a model about as much for a hundred answers as for one.
    output = model.generate(**prompts, max_new_tokens=max_new_tokens, do_sample=not is_greedy)
    completions = output[:, prompts["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    num_right = sum(final_answer(text) == str(p.answer) for text, p in zip(texts, problems, strict=True))
    num_tokens = int((completions != tokenizer.pad_token_id).sum())
    return Accuracy(num_right / len(problems), num_tokens / len(problems))


def build(directory: Path, settings: Settings, say: Report, report: Report) -> dict[str, object]:
    """Fill ``directory``; returns what was made and measured.

    Args:
        say: writes a line of progress now.
        report: writes one if the last is old enough.
    """
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    training, heldout = write_problems(directory, settings, say)
    shown = training[:4000]
    texts = [text for p in shown for text in (p.prompt, worked_solution(p), terse_answer(p.answer))]
    tokenizer = build_tokenizer(texts, settings.model.vocab_size)
    model = build_model(settings.model, tokenizer, settings.seed)
    say(f"tokenizer of {len(tokenizer)} entries, model of {model.num_parameters()} parameters")

    warm_start = WarmStart(model, tokenizer, settings.problems, settings.warm_start, settings.seed)
    steps, rate = warm_start.learn_to_work(report)
    say(f"phase 1 ended after {steps} steps, right {rate:.0%}")
    rough, exact = (Probe(training[:size], tokenizer) for size in (ROUGH_PROBE_SIZE, PROBE_SIZE))
    weak_steps, mixed = warm_start.learn_to_guess(rough, exact, report)
    say(f"phase 2 ended after {weak_steps} steps, right {mixed.sampled:.0%}, greedy {mixed.greedy:.0%}")

    if weak_steps >= settings.warm_start.max_weak_steps:
        say("warning: the start is not where it was asked to be; another seed may do better")

    model.eval()
    torch.manual_seed(settings.seed)
    limit = settings.max_new_tokens
    greedy = measure(model, tokenizer, heldout, max_new_tokens=limit, is_greedy=True, report=report)
    sampled = measure(model, tokenizer, heldout, max_new_tokens=limit, is_greedy=False, report=report)
    say(f"held-out problems: greedy {greedy.right:.1%} right, sampled {sampled.right:.1%}, {sampled.tokens:.1f} tokens")
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    return {
        "num_parameters": model.num_parameters(),
        "vocab_size": len(tokenizer),
        "num_train": len(training),
        "num_heldout": len(heldout),
        "phase_1": {"steps": steps, "pass_rate": rate},
        "phase_2": {"steps": weak_steps, **asdict(mixed)},
        "start": {"greedy": asdict(greedy), "sampled": asdict(sampled)},
    }
