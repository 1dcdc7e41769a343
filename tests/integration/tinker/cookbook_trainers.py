"""The trainers of ``tinker-cookbook`` on rows of our own: ``python cookbook_trainers.py URL KEY MODEL FOLDER``.

Supervised, reinforced by the share of low tokens, and distilled from what the supervised one has saved, in turn.
Runs in the client's environment, without anything of ours.
"""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import chz
from tinker_cookbook import model_info, renderers
from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.distillation.datasets import (
    DistillationDatasetConfig,
    PromptOnlyDataset,
    PromptOnlyEnv,
    TeacherConfig,
)
from tinker_cookbook.rl import train as reinforced
from tinker_cookbook.rl.problem_env import ProblemGroupBuilder
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder, StepResult
from tinker_cookbook.supervised import train as supervised
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.tokenizer_utils import get_tokenizer

RENDERER = "role_colon"
PROMPTS = [f"Ana has {n} pens, buys {n % 7}." for n in range(64)]
BATCH, GROUP, TOKENS = 4, 8, 8


class LowTokensEnv(PromptOnlyEnv):
    """Rewards the share of tokens of the lower half of the vocabulary, which a random model raises soon."""

    async def step(self, action: Any, *, extra: Any = None) -> StepResult:
        found = await super().step(action, extra=extra)
        half = len(self.renderer.tokenizer) // 2
        found.reward = sum(token < half for token in action) / max(1, len(action))
        return found


class LowTokensDataset(PromptOnlyDataset):
    """Prompts whose answers are rewarded."""

    def get_batch(self, index: int) -> Sequence[ProblemGroupBuilder]:
        chosen = self.prompts[index * self.batch_size :][: self.batch_size]
        return [ProblemGroupBuilder(partial(LowTokensEnv, each, self.renderer), self.group_size) for each in chosen]


@chz.chz
class PromptsBuilder(RLDatasetBuilder):
    """Builds either set of prompts."""

    model: str
    is_rewarded: bool

    async def __call__(self) -> tuple[RLDataset, None]:
        tokenizer = get_tokenizer(self.model)
        renderer = renderers.get_renderer(RENDERER, tokenizer)
        kind = LowTokensDataset if self.is_rewarded else PromptOnlyDataset
        return kind(PROMPTS, BATCH, GROUP, renderer, tokenizer), None


def conversations(folder: Path) -> Path:
    """Write the rows of the supervised one."""
    path = folder / "rows.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"So she has {n + n % 7}."}]}
        for n, text in enumerate(PROMPTS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def main() -> None:
    url, key, model, folder = sys.argv[1:]
    os.environ["TINKER_API_KEY"] = key
    model_info.get_recommended_renderer_name = lambda *_, **__: RENDERER
    for kind in ("supervised", "reinforced", "distilled"):
        train(kind, url, model, Path(folder))


def train(kind: str, url: str, model: str, folder: Path) -> None:
    """Run one of them to its end; its figures are in ``FOLDER/KIND/metrics.jsonl``."""
    common = {
        "base_url": url,
        "log_path": str(folder / kind),
        "model_name": model,
        "renderer_name": RENDERER,
        "recipe_name": "of_tests",
        "lora_rank": 8,
        "save_every": 4,
        "eval_every": 8,
    }
    if kind == "supervised":
        rows = ChatDatasetBuilderCommonConfig(
            model_name_for_tokenizer=model, renderer_name=RENDERER, max_length=128, batch_size=BATCH
        )
        builder = FromConversationFileBuilder(file_path=str(conversations(folder)), test_size=8, common_config=rows)
        asyncio.run(supervised.main(supervised.Config(**common, dataset_builder=builder, learning_rate=5e-3)))
    elif kind == "reinforced":
        builder = PromptsBuilder(model=model, is_rewarded=True)
        config = reinforced.Config(**common, dataset_builder=builder, learning_rate=1e-2, max_tokens=TOKENS)
        asyncio.run(reinforced.main(config))
    else:
        saved = [json.loads(line) for line in (folder / "supervised" / "checkpoints.jsonl").read_text().splitlines()]
        teacher = TeacherConfig(base_model=model, load_checkpoint_path=saved[-1]["sampler_path"])
        prompts = PromptsBuilder(model=model, is_rewarded=False)
        rows = DistillationDatasetConfig(dataset_builder=prompts, teacher_config=teacher, groups_per_batch=BATCH)
        config = train_on_policy.Config(**common, dataset_configs=[rows], learning_rate=5e-3, max_tokens=TOKENS)
        asyncio.run(train_on_policy.main(config))


if __name__ == "__main__":
    main()
