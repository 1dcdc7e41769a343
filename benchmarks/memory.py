"""Predicted memory of trainer and embedded engine beside what is measured, in 12 settings.

Each setting runs in a process of its own, with the code that a fleet runs: a learner is made of the model's directory,
trains two steps of samples of the largest length, and writes an image of its weights after each; an engine fills all
slots with samples of the largest length, and loads new weights twice while it samples. Measured is the peak of the
process's own memory: Linux' highest resident size (``VmHWM``), without the pages of mapped files (``RssFile``), which
the kernel takes back; or what was seen of ``RssAnon`` and ``RssShmem`` every 20 ms, if that is more. Models are made of
configurations, with random weights.

``python -m benchmarks.memory [--only NAME ...] [--large] [--json FILE]``; ``--large`` adds one that needs 9 GB.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.models import SIZES, write_model
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.sizes.engine import engine_footprint
from flotilla.shared.sizes.model import read_sizes
from flotilla.shared.sizes.parts import Footprint
from flotilla.shared.sizes.trainer import trainer_footprint

LOOK_SECONDS: Final = 0.02
SETTLE_SECONDS: Final = 0.05
GROUP_SIZE: Final = 8


@dataclass(frozen=True)
class Setting:
    """What is run.

    Attributes:
        part: trainer or engine.
        model: a key of ``SIZES``.
        groups: of 8 samples; of an engine, those that fill its slots.
        prompt_tokens, sampled_tokens: of a sample.
        sections: of the spec.
    """

    part: str
    model: str
    groups: int
    prompt_tokens: int
    sampled_tokens: int
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def spec(self, model: Path) -> ExperimentSpec:
        """Make the spec."""
        written: dict[str, Any] = {
            "name": "memory",
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"path": "rows.jsonl", "max_prompt_tokens": self.prompt_tokens},
            "reward": {"components": [{"kind": "numeric"}]},
            "samples": None,
            "rollout": {
                "group_size": GROUP_SIZE,
                "engine": {
                    "context_tokens": self.prompt_tokens + self.sampled_tokens,
                    "slots": self.groups * GROUP_SIZE,
                    "device": "cpu",
                },
                "sampling": {"max_new_tokens": self.sampled_tokens, "ignore_eos": True},
            },
            "parallelism": {"device": "cpu"},
            "optimisation": {"steps": 4, "groups_per_mini_batch": self.groups, "micro_batch_tokens": 1024},
        }
        for name, section in self.sections.items():
            written[name] = {**written.get(name, {}), **section}
        return validate_spec(written)


LORA: Final = {"lora": {"rank": 16, "alpha": 32}}
ALONE: Final = {"publication": {"lora": "adapters"}}
SETTINGS: Final[Mapping[str, Setting]] = {
    "tiny": Setting("trainer", "tiny", 4, 24, 128),
    "36M": Setting("trainer", "36M", 2, 24, 128),
    "36M, one large pass": Setting("trainer", "36M", 2, 24, 128, {"optimisation": {"micro_batch_tokens": 4096}}),
    "36M, checkpointing": Setting("trainer", "36M", 2, 24, 128, {"optimisation": {"activation_checkpointing": True}}),
    "36M, reference": Setting("trainer", "36M", 2, 24, 128, {"algorithm": {"kl": {"placement": "loss"}}}),
    "36M, LoRA": Setting("trainer", "36M", 2, 24, 128, {"model": LORA, "asynchrony": ALONE}),
    "150M": Setting("trainer", "150M", 2, 24, 64, {"optimisation": {"micro_batch_tokens": 1024}}),
    "150M, bfloat16": Setting(
        "trainer", "150M", 2, 24, 64, {"model": {"dtype": "bfloat16"}, "optimisation": {"micro_batch_tokens": 512}}
    ),
    "0.6B, LoRA": Setting(
        "trainer", "0.6B", 1, 24, 40,
        {"model": LORA, "asynchrony": ALONE, "optimisation": {"micro_batch_tokens": 512}},
    ),
    "engine, tiny": Setting("engine", "tiny", 8, 24, 128),
    "engine, 36M": Setting("engine", "36M", 8, 24, 232),
    "engine, 0.6B, bfloat16": Setting("engine", "0.6B", 1, 24, 40, {"model": {"dtype": "bfloat16"}}),
}  # fmt: skip
LARGE: Final[Mapping[str, Setting]] = {
    "0.6B, bfloat16 without masters": Setting(
        "trainer", "0.6B", 1, 24, 40,
        {"model": {"dtype": "bfloat16"}, "optimisation": {"micro_batch_tokens": 512, "masters": "model"}},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One setting's figures."""

    name: str
    predicted: int
    measured: int
    parts: Mapping[str, int]
    seconds: float

    @property
    def ratio(self) -> float:
        """Predicted, in measured ones."""
        return self.predicted / self.measured

    def line(self) -> str:
        """Format it for people."""
        figures = f"{self.predicted / 10**6:9.0f} MB {self.measured / 10**6:9.0f} MB {self.ratio:7.3f}"
        return f"{self.name:32} {figures} {self.seconds:7.0f} s"


HEADER: Final = f"{'setting':32} {'predicted':>12} {'measured':>12} {'ratio':>7} {'took':>9}"


def predicted(setting: Setting, spec: ExperimentSpec, model: Path) -> Footprint:
    """Predict a setting's memory."""
    found = (trainer_footprint if setting.part == "trainer" else engine_footprint)(spec, read_sizes(model))
    assert found is not None
    return found


def measured(name: str, model: Path) -> int:
    """Run a setting in a process of its own; its peak in bytes.

    Raises:
        RuntimeError: it fails.
    """
    command = [sys.executable, "-m", "benchmarks.memory", "--child", name, str(model)]
    process = subprocess.Popen(command)
    status, peak, highest, mapped = Path(f"/proc/{process.pid}/status"), 0, 0, 0
    while process.poll() is None:
        found = {
            key: int(size) << 10 for key, size in re.findall(r"^(\w+):\s+(\d+) kB", status.read_text(), re.MULTILINE)
        }
        if "VmHWM" in found:  # It is gone as soon as the process has ended.
            peak = max(peak, found["RssAnon"] + found["RssShmem"])
            highest, mapped = found["VmHWM"], max(mapped, found["RssFile"])
        time.sleep(LOOK_SECONDS)
    if process.returncode != 0:
        raise RuntimeError(f"{name} ended with {process.returncode}: its error is above")
    return max(peak, highest - mapped)


def prepare(directory: Path, size: str) -> None:
    """Write a model with random weights, and a tokenizer that nothing reads."""
    from flotilla.services.trainer.tiny_models.making import make_tokenizer

    write_model(directory, size, "bfloat16" if size == "0.6B" else "float32")
    make_tokenizer(["1 + 2 = 3"], ["1"], 4096).save_pretrained(directory)


def train(setting: Setting, spec: ExperimentSpec) -> None:
    """Train two steps, and write an image after each."""
    import numpy as np

    # What the trainer's process imports.
    import flotilla.services.trainer.worker.run  # noqa: F401
    from benchmarks.trainer_updates import Batch, groups_of
    from flotilla.services.trainer.checkpoint.manager import build_alone
    from flotilla.services.trainer.weights.flat_parameters import FlatParameters
    from flotilla.services.trainer.worker.images import ImagePool

    learner = build_alone(spec, None).learner
    assert isinstance(learner.weights, FlatParameters)
    images = ImagePool(learner.weights)
    images.snapshot()
    random = np.random.default_rng(0)
    vocabulary = SIZES[setting.model]["vocab_size"]

    def some(count: int) -> list[int]:
        drawn: list[int] = random.integers(2, vocabulary, count).tolist()
        return drawn

    prompts = [prompt for _ in range(setting.groups) for prompt in [some(setting.prompt_tokens)] * GROUP_SIZE]
    log_probs = [[-float(np.log(vocabulary))] * setting.sampled_tokens for _ in prompts]
    rewards = [float(number % 2) for number in range(len(prompts))]
    groups = groups_of(Batch(prompts, [some(setting.sampled_tokens) for _ in prompts], log_probs, rewards, 0))
    for step in (1, 2):
        learner.train(groups, step)
        images.snapshot()
        time.sleep(SETTLE_SECONDS)
    images.close()


def sample(setting: Setting, spec: ExperimentSpec, model: Path) -> None:
    """Fill an engine's slots, and load weights twice while it samples."""
    # What the engine's process imports.
    import flotilla.services.rollout.engines.process.in_process  # noqa: F401
    from flotilla.services.rollout.engines.base import GenerationRequest, SamplingParameters
    from flotilla.services.rollout.engines.embedded.engine import TorchEngine
    from flotilla.services.rollout.engines.own import embedded_settings
    from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
    from flotilla.shared.config.sections.engine import TorchEngineConfig

    assert isinstance(spec.rollout.engine, TorchEngineConfig)
    engine = TorchEngine(embedded_settings(spec, spec.rollout.engine))
    sampling = SamplingParameters(max_new_tokens=setting.sampled_tokens, ignore_eos=True)
    for number in range(setting.groups):
        prompt = tuple(range(2 + number, 2 + number + setting.prompt_tokens))
        seeds = tuple(range(GROUP_SIZE * number, GROUP_SIZE * (number + 1)))
        engine.submit(GenerationRequest(str(number), prompt, seeds, sampling))
    # A model's file is an image: names and tensors in the same format.
    image, steps = model / "model.safetensors", 0
    while not engine.is_idle:
        engine.step()
        steps += 1
        if steps in {2, setting.sampled_tokens // 2}:
            engine.request_update(steps, image, steps, OnWeightUpdate.CONTINUE)
    time.sleep(SETTLE_SECONDS)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--only", nargs="+", help="names of settings")
    parser.add_argument("--large", action="store_true", help="those, too, that need 9 GB")
    parser.add_argument("--child", nargs=2, metavar=("NAME", "MODEL"), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(arguments)
    known = {**SETTINGS, **LARGE}
    if options.child is not None:
        setting, model = known[options.child[0]], Path(options.child[1])
        spec = setting.spec(model)
        return train(setting, spec) if setting.part == "trainer" else sample(setting, spec, model)
    chosen = {name: each for name, each in known.items() if not options.only or name in options.only}
    if not options.large and not options.only:
        chosen = dict(SETTINGS)
    rows = []
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        for name, setting in chosen.items():
            began, model = time.monotonic(), Path(directory) / setting.model
            if not model.exists():
                subprocess.run(
                    [sys.executable, "-c", "import sys; from benchmarks.memory import *; "
                     "prepare(Path(sys.argv[1]), sys.argv[2])", str(model), setting.model],
                    check=True,
                )  # fmt: skip
            found = predicted(setting, setting.spec(model), model)
            parts = {each.name: each.num_bytes for each in found.parts}
            rows.append(Row(name, found.total, measured(name, model), parts, time.monotonic() - began))
            print(rows[-1].line(), flush=True)
    print(f"largest difference: {max(abs(each.ratio - 1) for each in rows):.1%}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) | {"ratio": row.ratio} for row in rows], indent=2) + "\n")
    return None


if __name__ == "__main__":
    main()
