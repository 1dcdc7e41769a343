"""TRL's update on a given batch: the child of ``benchmarks.trainer``, run by an interpreter that has TRL.

Reads a batch from the file that its argument names; makes one update for each line of standard input, and writes its
seconds. Micro-batches are what TRL makes of a step: equal numbers of samples, padded to the longest of the whole step.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer


def open_trainer(given: dict[str, Any], directory: str, rows: int) -> GRPOTrainer:
    """Make TRL's trainer for the batch's model, with one update per step."""
    config = GRPOConfig(
        output_dir=directory,
        # What it would generate with is not used; micro-batches are passed to its loss as they are.
        per_device_train_batch_size=given["group_size"],
        gradient_accumulation_steps=-(-len(given["prompts"]) // rows),
        num_generations=given["group_size"],
        learning_rate=given["learning_rate"],
        epsilon=given["clip"],
        beta=0.0,
        loss_type="dapo",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 8}),
        processing_class=tokenizer,
    )


def micro_batches_of(given: dict[str, Any], rows: int) -> list[dict[str, torch.Tensor]]:
    """Pad the samples to the longest of the step, and cut them into equal numbers."""
    width = max(map(len, given["completions"]))
    count = len(given["prompts"])
    ids, mask, old = (torch.zeros(count, width, dtype=kind) for kind in (torch.int64, torch.int64, torch.float32))
    for number, completion in enumerate(given["completions"]):
        ids[number, : len(completion)] = torch.tensor(completion)
        mask[number, : len(completion)] = 1
        old[number, : len(completion)] = torch.tensor(given["log_probs"][number])
    prompts = torch.tensor(given["prompts"])
    whole = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": ids,
        "completion_mask": mask,
        "old_per_token_logps": old,
        "advantages": torch.tensor(given["advantages"]),
    }
    total = mask.sum()
    return [
        {name: values[start : start + rows] for name, values in whole.items()} | {"num_items_in_batch": total}
        for start in range(0, count, rows)
    ]


def main() -> None:
    """Answer each line with the seconds of an update."""
    given = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(given["threads"])
    longest = max(map(len, given["completions"])) + len(given["prompts"][0])
    rows = max(1, min(len(given["prompts"]), given["micro_tokens"] // longest))
    with tempfile.TemporaryDirectory() as directory:
        trainer = open_trainer(given, directory, rows)
        model = trainer.model
        optimizer = torch.optim.AdamW(model.parameters(), lr=given["learning_rate"], fused=True)
        parts = micro_batches_of(given, rows)
        for _ in sys.stdin:
            started = time.perf_counter()
            for part in parts:
                torch.autograd.backward(trainer.compute_loss(model, part))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    main()
