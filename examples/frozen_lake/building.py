"""Builds the directory's contents: tokenizer, model, its weak start, and the seeds of the lakes."""

import json
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from examples.arithmetic.model import build_model
from flotilla.services.rollout.environments.frozen_lake import ACTIONS, FrozenLake

from .settings import Settings
from .tokenizer import build_tokenizer
from .walks import HELD_OUT, PROMPT, Walk, walk

Report = Callable[[str], None]
STEPS_BETWEEN_PROBES = 10
PROBE_SIZE = 256
IGNORED = -100


def write_rows(path: Path, seeds: range) -> None:
    """Write one JSON object per line: prompt and the seed of the lake."""
    path.write_text("".join(json.dumps({"prompt": PROMPT, "seed": seed}) + "\n" for seed in seeds))


class Learner:
    """One model's supervised training on walks that are drawn as they are needed."""

    def __init__(self, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: Settings) -> None:
        self._model, self._tokenizer, self._settings = model, tokenizer, settings
        self._random = random.Random(f"walks {settings.seed}")
        self._lake = FrozenLake(settings.size)
        self._opening = self._ids("<|im_start|>assistant\n")
        # Every action is one token, which the probe relies on.
        self._actions = torch.tensor([self._ids(action) for action in ACTIONS])[:, 0]
        rate = settings.warm_start.learning_rate
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def step(self, good_share: float, learning_rate: float) -> float:
        """Train on one batch of walks; returns the loss."""
        settings = self._settings
        seeds = [self._random.randrange(settings.num_train) for _ in range(settings.warm_start.batch_size)]
        walks = [walk(self._lake, seed, good_share, settings.max_turns, self._random) for seed in seeds]
        input_ids, labels = self._batch(walks)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        logits = self._model(input_ids=input_ids, use_cache=False).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    def _batch(self, walks: list[Walk]) -> tuple[Tensor, Tensor]:
        """Lay walks out, padded on the right; labels [B, T] are the tokens that the model has to say."""
        rows = []
        for each in walks:
            ids, said = [], []
            for place, message in enumerate(each.messages()):
                text = f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
                own = self._ids(text)
                is_answer = message["role"] == "assistant"
                start = len(self._opening) if is_answer else len(own)
                ids += own
                # The newline behind the end of an answer is the template's; what happened by chance is not learned.
                is_learned = is_answer and each.on_purpose[place // 2]
                said += [False] * start + [is_learned] * (len(own) - start - is_answer) + [False] * is_answer
            rows.append((ids, said))
        length = max(len(ids) for ids, _ in rows)
        input_ids = torch.full((len(rows), length), self._tokenizer.pad_token_id)
        labels = torch.full((len(rows), length), IGNORED)
        for row, (ids, said) in enumerate(rows):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            labels[row, : len(ids)] = torch.where(torch.tensor(said), torch.tensor(ids), IGNORED)
        return input_ids, labels

    @torch.no_grad()
    def success(self, seeds: range) -> float:
        """Walk at temperature 1, all lakes at once; returns the share of walks that reach the goal."""
        generator = torch.Generator().manual_seed(self._settings.seed)
        lakes = [FrozenLake(self._settings.size) for _ in seeds]
        chats: list[list[dict[str, str]]] = []
        for lake, seed in zip(lakes, seeds, strict=True):
            chats.append([{"role": "user", "content": f"{PROMPT}\n\n{lake.reset(seed)[0]}"}])
        walking, num_right = list(range(len(lakes))), 0
        for _ in range(self._settings.max_turns):
            rendered = self._tokenizer.apply_chat_template(
                [chats[n] for n in walking], tokenize=False, add_generation_prompt=True
            )
            ids = [self._ids(text) for text in rendered]
            lengths = torch.tensor([len(each) for each in ids])
            rows = torch.full((len(ids), int(lengths.max())), self._tokenizer.pad_token_id)
            for row, each in enumerate(ids):
                rows[row, : len(each)] = torch.tensor(each)
            hidden = self._model.model(input_ids=rows, use_cache=False).last_hidden_state
            logits = self._model.lm_head(hidden[torch.arange(len(ids)), lengths - 1])[:, self._actions]
            chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0].tolist()
            still = []
            for number, action in zip(walking, chosen, strict=True):
                shown, reward, is_over, _, _ = lakes[number].step(ACTIONS[action])
                num_right += reward > 0
                chats[number] += [
                    {"role": "assistant", "content": ACTIONS[action]},
                    {"role": "user", "content": shown},
                ]
                if not is_over:
                    still.append(number)
            walking = still
            if not walking:
                break
        return num_right / len(lakes)


def warm_start(learner: Learner, settings: Settings, report: Report) -> dict[str, float]:
    """Learn to walk, then to stumble, until so many walks reach the goal as the settings say."""
    own = settings.warm_start
    probe = range(settings.num_train, settings.num_train + PROBE_SIZE)
    success, steps = 0.0, 0
    while steps < own.good_steps and success < own.stop_success:
        for _ in range(5 * STEPS_BETWEEN_PROBES):
            steps += 1
            loss = learner.step(own.good_share, own.learning_rate * min(1.0, steps / 20))
        success = learner.success(probe)
        report(f"phase 1, learning to walk: step {steps}, loss {loss:.3f}, {success:.0%} reach the goal")
    learned, weak_steps, rate, was_above = success, 0, own.weak_learning_rate, True
    lower, upper = own.success_window
    while not lower <= success <= upper and weak_steps < own.max_weak_steps:
        is_above = success > upper
        if is_above != was_above:
            rate, was_above = max(rate / 2, own.weak_learning_rate / 4), is_above
        for _ in range(STEPS_BETWEEN_PROBES):
            learner.step(own.weak_share if is_above else own.good_share, rate)
        weak_steps += STEPS_BETWEEN_PROBES
        success = learner.success(probe)
        report(f"phase 2, learning bad habits: step {weak_steps}, {success:.0%} reach the goal")
    return {"good_steps": steps, "learned": learned, "weak_steps": weak_steps, "success": success}


def build(directory: Path, settings: Settings, say: Report, report: Report) -> dict[str, object]:
    """Fill ``directory``; returns what was made and measured.

    Args:
        say: writes a line of progress now.
        report: writes one if the last is old enough.
    """
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    transformers_logging.disable_progress_bar()
    heldout = range(HELD_OUT, HELD_OUT + settings.num_heldout)
    write_rows(directory / "train.jsonl", range(settings.num_train))
    write_rows(directory / "heldout.jsonl", heldout)
    tokenizer = build_tokenizer()
    model = build_model(settings.model, tokenizer, settings.seed)
    say(f"tokenizer of {len(tokenizer)} entries, model of {model.num_parameters()} parameters")
    learner = Learner(model, tokenizer, settings)
    found = warm_start(learner, settings, report)
    start = learner.success(heldout)
    say(f"held-out lakes: {start:.1%} of the walks reach the goal, {found['learned']:.0%} did before the bad habits")
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    return {
        "num_parameters": model.num_parameters(),
        "vocab_size": len(tokenizer),
        "model": asdict(settings.model),
        "warm_start": found,
        "success": start,
    }
