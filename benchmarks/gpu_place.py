"""Where ``benchmarks.gpu`` runs, and how large its models are: one GPU, or in small a CPU."""

import gc
import shutil
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from flotilla.shared.weights.image.files import default_directories

Figures = dict[str, Any]
Found = Iterator[tuple[str, Any]]
"""What a part finds, one thing after the other."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3; with ``experts`` of a mixture of them, two for each token."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    experts: int = 0

    @property
    def config(self) -> PretrainedConfig:
        """The model's config."""
        sizes: dict[str, Any] = {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        }
        if not self.experts:
            return Qwen3Config(**sizes)
        moe = {"moe_intermediate_size": self.intermediate, "num_experts": self.experts, "num_experts_per_tok": 2}
        return Qwen3MoeConfig(**sizes, **moe, decoder_sparse_step=1, mlp_only_layers=[])


@dataclass(frozen=True)
class FleetSize:
    """What whole fleets run.

    Attributes:
        shape: of the model; as many token ids as the arithmetic example's tokenizer has, and no fewer.
        steps: of the long run.
        short_steps: of the others.
        groups, group_size: of a step.
        new_tokens: of each answer.
        context_tokens, slots: of the engine.
    """

    shape: Shape
    steps: int
    short_steps: int
    groups: int
    group_size: int
    new_tokens: int
    context_tokens: int
    slots: int


@dataclass(frozen=True, eq=False)
class Place:
    """Where the parts run, and how large they are.

    Attributes:
        device: of engine and trainer.
        dtype: of their weights.
        shapes: of the models that are measured.
        experts: of the one with a mixture of experts.
        batches: samples at a time.
        prompt_tokens, new_tokens: of each sample.
        fleet: what whole fleets run.
    """

    device: str
    dtype: Literal["float32", "bfloat16"]
    shapes: dict[str, Shape]
    experts: Shape
    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    fleet: FleetSize

    @property
    def is_gpu(self) -> bool:
        """Whether this is no rehearsal."""
        return self.device != "cpu"

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of their weights, as torch names it."""
        return torch.float32 if self.dtype == "float32" else torch.bfloat16

    def finish(self) -> None:
        """Wait until the device has done what it was given."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def free(self) -> None:
        """Give back what nobody uses any more."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def seconds(self, run: Callable[[], object], rounds: int = 3) -> float:
        """Time a call: the median of some, after one that warms up."""
        times = []
        for _ in range(rounds + 1):
            self.finish()
            started = time.perf_counter()
            run()
            self.finish()
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])

    def model(self, shape: Shape) -> Any:
        """Make a model with random weights on the device."""
        torch.manual_seed(0)
        with torch.device(self.device):
            return AutoModelForCausalLM.from_config(shape.config, dtype=self.torch_dtype).eval()


def roomy_directory(num_bytes: int) -> Path:
    """Choose where so many bytes have room: shared memory, or the disk."""
    places = default_directories()
    return next((each for each in places if shutil.disk_usage(each).free > num_bytes), places[-1])


def attempted(run: Callable[[], Figures]) -> Figures:
    """Measure something; a failure is what it found, and the others are measured all the same."""
    try:
        return run()
    except Exception:
        return {"failed": traceback.format_exc()}


GPU = Place(
    "cuda:0",
    "bfloat16",
    {"0.6B": Shape(1024, 28, 16, 8, 128, 3072, 151_936), "4B": Shape(2560, 36, 32, 8, 128, 9728, 151_936)},
    experts=Shape(1024, 8, 16, 8, 128, 768, 32_000, experts=16),
    batches=(1, 32, 256),
    prompt_tokens=128,
    new_tokens=128,
    fleet=FleetSize(
        Shape(1024, 28, 16, 8, 128, 3072, 512),
        steps=20,
        short_steps=6,
        groups=8,
        group_size=8,
        new_tokens=128,
        context_tokens=512,
        slots=64,
    ),
)
REHEARSAL = Place(
    "cpu",
    "float32",
    {"tiny": Shape(64, 2, 4, 2, 16, 256, 428)},
    experts=Shape(64, 2, 4, 2, 16, 32, 428, experts=4),
    batches=(1, 8),
    prompt_tokens=8,
    new_tokens=8,
    fleet=FleetSize(
        Shape(64, 2, 2, 1, 32, 128, 512),
        steps=4,
        short_steps=2,
        groups=2,
        group_size=2,
        new_tokens=8,
        context_tokens=128,
        slots=4,
    ),
)
