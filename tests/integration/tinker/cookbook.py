"""Loops of ``tinker-cookbook`` as they are, on rows of our own: ``python cookbook.py URL KEY MODEL LOOP FOLDER``.

Their data sets are on a hub, and its recommended renderers know hosted models by name: those two are stood in for.
Runs in the client's environment, without anything of ours.
"""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import datasets
from tinker_cookbook import model_info

ROWS = 16


def conversations(*_: Any, **__: Any) -> Any:
    """Stand in for No Robots."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Ana has {n} pens, buys {n % 7}."},
                {"role": "assistant", "content": f"So she has {n + n % 7}."},
            ]
        }
        for n in range(ROWS)
    ]
    return datasets.DatasetDict({"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows)})


def problems(*_: Any, **__: Any) -> Any:
    """Stand in for GSM8K."""
    rows = [{"question": f"Ana has {n} pens, buys {n % 7}.", "answer": f"#### {n + n % 7}"} for n in range(ROWS)]
    return datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})


def main() -> None:
    url, key, model, loop, folder = sys.argv[1:]
    os.environ["TINKER_API_KEY"] = key
    datasets.load_dataset = {"sl_loop": conversations, "rl_loop": problems}[loop]
    model_info.get_recommended_renderer_name = lambda *_, **__: "role_colon"
    recipe = importlib.import_module(f"tinker_cookbook.recipes.{loop}")
    common = {"base_url": url, "log_path": str(Path(folder)), "model_name": model, "lora_rank": 8, "batch_size": 4}
    if loop == "sl_loop":
        config = recipe.Config(**common, learning_rate=5e-3, max_length=256, save_every=2)
    else:
        # A random model never finds an answer: what a step does is shown by a reward of every other one.
        recipe.get_reward = lambda response, _: float(len(response) % 2)
        config = recipe.Config(**common, group_size=4, learning_rate=1e-3, max_tokens=8, save_every=2)
    recipe.main(config)


if __name__ == "__main__":
    main()
