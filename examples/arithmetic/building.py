"""Builds the directory's contents: problems, tokenizer, model, warm start, and the measurement of where it starts."""

import json
import random
import re
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from .model import build_model
from .problems import Problem, chain_of, heldout_set, terse_answer, training_set, worked_solution
from .settings import Settings
from .tokenizer import build_tokenizer, prompt_ids
from .warm_start import Probe, Report, WarmStart

PROBE_SIZE = 256


def final_answer(completion: str) -> str | None:
    """Read the number after the last ``####``; None where there is none."""
    found: list[str] = re.findall(r"####\s*(-?\d+)", completion)
    return found[-1] if found else None


@torch.no_grad()
def measure(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[Problem],
    *,
    max_new_tokens: int,
    is_greedy: bool,
) -> tuple[float, float]:
    """Generate one answer per problem; returns the share that is right and the mean length in tokens."""
    prompts = prompt_ids(tokenizer, [problem.prompt for problem in problems])
    padded = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
    how = {"do_sample": False} if is_greedy else {"do_sample": True, "temperature": 1.0}
    output = model.generate(**padded, max_new_tokens=max_new_tokens, **how)
    completions = output[:, padded["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    right = [final_answer(text) == str(problem.answer) for text, problem in zip(texts, problems, strict=True)]
    length = (completions != tokenizer.pad_token_id).sum().item() / len(problems)
    return sum(right) / len(right), length


def write_rows(path: Path, problems: list[Problem]) -> None:
    """Write one JSON object per line: prompt, answer (a string) and chain."""
    with path.open("w") as file:
        for problem in problems:
            row = {"prompt": problem.prompt, "answer": str(problem.answer), "chain": chain_of(problem)}
            file.write(json.dumps(row) + "\n")


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
    say(f"{len(training)} training problems, {len(heldout)} held out; for example: {training[0].prompt}")

    shown = training[:4000]
    texts = [text for p in shown for text in (p.prompt, worked_solution(p), terse_answer(p.answer))]
    tokenizer = build_tokenizer(texts, settings.model.vocab_size)
    model = build_model(settings.model, tokenizer, settings.seed)
    say(f"tokenizer of {len(tokenizer)} entries, model of {model.num_parameters()} parameters")

    warm_start = WarmStart(model, tokenizer, settings.problems, settings.warm_start, settings.seed)
    steps, rate = warm_start.learn_to_work(report)
    say(f"phase 1 ended after {steps} steps, right {rate:.0%}")
    mix_steps, mixed = warm_start.learn_to_guess(Probe(training[:PROBE_SIZE], tokenizer), report)
    say(f"phase 2 ended after {mix_steps} steps, right {mixed.sampled:.0%}, greedy {mixed.greedy:.0%}")

    model.eval()
    torch.manual_seed(settings.seed)
    limit = settings.max_new_tokens
    greedy, greedy_length = measure(model, tokenizer, heldout, max_new_tokens=limit, is_greedy=True)
    sampled, sampled_length = measure(model, tokenizer, heldout, max_new_tokens=limit, is_greedy=False)
    say(f"held-out problems: greedy {greedy:.1%} right, sampled {sampled:.1%} right, {sampled_length:.1f} tokens")
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    return {
        "num_parameters": model.num_parameters(),
        "vocab_size": len(tokenizer),
        "num_train": len(training),
        "num_heldout": len(heldout),
        "phase_1": {"steps": steps, "pass_rate": rate},
        "phase_2": {"steps": mix_steps, "sampled": mixed.sampled, "greedy": mixed.greedy, "worked": mixed.worked},
        "start": {
            "greedy_accuracy": greedy,
            "greedy_tokens": greedy_length,
            "sampled_accuracy": sampled,
            "sampled_tokens": sampled_length,
        },
    }
