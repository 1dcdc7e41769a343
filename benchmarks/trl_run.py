"""A run of TRL's ``GRPOTrainer``: the child of ``benchmarks.end_to_end``, run by an interpreter that has TRL.

Reads its settings from the file that its argument names. Writes a line of JSON when training begins and after each
step: its number, the time, and the sampled tokens of the answers that it graded since the line before.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import plain_rewards
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer


class Told(TrainerCallback):
    """Tells when steps end, and keeps weights."""

    def __init__(self, given: dict[str, Any], model: torch.nn.Module) -> None:
        self._given, self._model = given, model
        self.sampled = 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Tell that everything is loaded."""
        self._tell(0)

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """Tell that a step is done."""
        self._tell(state.global_step)
        every = self._given["keep_every"]
        if every and state.global_step % every == 0:
            self._model.save_pretrained(Path(self._given["kept"]) / str(state.global_step))

    def _tell(self, step: int) -> None:
        print(json.dumps({"step": step, "at": time.time(), "sampled": self.sampled}), flush=True)
        self.sampled = 0


def config_of(given: dict[str, Any]) -> GRPOConfig:
    """Make TRL's settings: those of the comparison, its own defaults in all else but where that would slow it down."""
    return GRPOConfig(
        output_dir=given["output"],
        per_device_train_batch_size=given["samples"],
        steps_per_generation=given["steps_per_generation"],
        num_generations=given["group_size"],
        max_completion_length=given["max_new_tokens"],
        max_steps=given["steps"],
        learning_rate=given["learning_rate"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=given["warmup_updates"],
        adam_beta1=given["betas"][0],
        adam_beta2=given["betas"][1],
        max_grad_norm=given["max_grad_norm"],
        weight_decay=given["weight_decay"],
        epsilon=given["clip_low"],
        epsilon_high=given["clip_high"],
        beta=0.0,
        loss_type="dapo",
        seed=given["seed"],
        use_cpu=True,
        bf16=given["dtype"] == "bfloat16",
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )


def adapters_of(lora: dict[str, Any] | None) -> Any:
    """Make the settings of adapters on all linear layers; None where all weights are trained."""
    if lora is None:
        return None
    from peft import LoraConfig

    return LoraConfig(r=lora["rank"], lora_alpha=lora["alpha"], target_modules="all-linear", lora_dropout=0.0)


def main() -> None:
    """Train."""
    given = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(given["threads"])
    transformers_logging.disable_progress_bar()
    reward = getattr(plain_rewards, given["reward"])
    model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=getattr(torch, given["dtype"]))
    told = Told(given, model)

    def graded(completions: list[Any], completion_ids: list[Any], answer: list[str], **_: Any) -> list[float]:
        told.sampled += sum(map(len, completion_ids))
        return [reward(each[0]["content"], label) for each, label in zip(completions, answer, strict=True)]

    rows = load_dataset("json", data_files=given["rows"], split="train", cache_dir=given["output"])
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=graded,
        args=config_of(given),
        train_dataset=rows.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]}),
        processing_class=AutoTokenizer.from_pretrained(given["model"]),
        callbacks=[told],
        peft_config=adapters_of(given["lora"]),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


if __name__ == "__main__":
    main()
