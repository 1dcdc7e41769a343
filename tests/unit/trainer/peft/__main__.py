"""Make the golden files beside this one: what peft makes of adapters that we trained. Needs peft; run by hand:

python -m tests.unit.trainer.peft
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel  # type: ignore[import-not-found, unused-ignore]
from safetensors.torch import save_file

from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.shared.models.hub import ADAPTER, ADAPTER_CONFIG
from tests.unit.trainer.builders import a_spec, uneven_groups
from tests.unit.trainer.peft.models import LORA, MODELS

FOLDER = Path(__file__).parent


def main() -> None:
    """Train each model for a step, and let peft read its adapters and merge them."""
    for name, make in MODELS.items():
        base, lora = make(), LORA[name]
        learner = Learner(_spec(lora), LoadedModel(make(), Path()))
        learner.train(uneven_groups(2), 1)
        assert learner.adapters is not None
        adapters = {key: tensor.contiguous() for key, tensor in learner.adapters.tensors().items()}
        with tempfile.TemporaryDirectory() as folder:
            save_file(adapters, Path(folder) / ADAPTER)
            (Path(folder) / ADAPTER_CONFIG).write_text(json.dumps(learner.adapters.peft_config("/nowhere", None)))
            merged = PeftModel.from_pretrained(make(), folder).merge_and_unload()
        weights = {f"base/{key}": tensor for key, tensor in base.named_parameters()}
        weights |= {f"adapter/{key}": tensor for key, tensor in adapters.items()}
        weights |= {f"merged/{key}": tensor for key, tensor in merged.named_parameters()}
        save_file({key: tensor.detach().clone() for key, tensor in weights.items()}, FOLDER / f"{name}.safetensors")
        moved = max(
            float((a - b).abs().max().detach()) for a, b in zip(base.parameters(), merged.parameters(), strict=True)
        )
        print(f"{name}: {len(adapters)} adapter tensors, weights moved by up to {moved:.3g}")


def _spec(lora: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return a_spec(
        model={"path": "/nowhere", "lora": lora},
        optimisation={"steps": 1, "groups_per_mini_batch": 2, "learning_rate": 0.1},
    )


if __name__ == "__main__":
    main()
