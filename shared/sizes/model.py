"""The sizes of a model that its memory depends on, read from ``config.json`` and the headers of its weights."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from flotilla.shared.config.sections.model import LoraConfig
from flotilla.shared.errors import FlotillaError, ModelError
from flotilla.shared.models.weight_files import safetensors_files, shapes_in

HEAD: Final = "lm_head.weight"
NAMED: Final = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
NOT_ADAPTED: Final = (
    "embed",
    "wte.",
    "wpe.",
    "lm_head.",
    "score.",
    "visual.",
    "vision_tower.",
    "multi_modal_projector.",
)
"""What is in the names of two-dimensional weights that are no linear layer of the decoder."""
EXPERTS: Final = ".experts."
ROUTERS: Final = (".gate.weight", ".router.weight")
"""Of a mixture: files hold experts one by one, transformers one weight for all, and a router is a weight of its own
kind. Neither is packed or adapted (``docs/lora.md``)."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a decoder.

    Attributes:
        shapes: of all weights, by their names in the checkpoint; of tied ones once.
        vocabulary, hidden, layers: V, H and L.
        queries: H_q * D, numbers that a layer's queries have for a token.
        keys: H_kv * D, those of its keys; its values have as many.
        inner: of the feed-forward part, of all experts that a token goes to.
        is_tied: the output layer is the embedding.
        has_head_norms: queries and keys are normalised per head.
        is_gated: the feed-forward part has a gate, and norms are by the root mean square (Llama and its relatives).
    """

    shapes: Mapping[str, tuple[int, ...]]
    vocabulary: int
    hidden: int
    layers: int
    queries: int
    keys: int
    inner: int
    is_tied: bool
    has_head_norms: bool
    is_gated: bool

    @property
    def parameters(self) -> int:
        """All of them."""
        return sum(map(math.prod, self.shapes.values()))

    @property
    def head(self) -> int:
        """Parameters of the output layer."""
        return self.vocabulary * self.hidden

    def as_scorer(self) -> "ModelSizes":
        """Take the body with one output in the place of the output layer: a critic or a reward model."""
        body = {name: shape for name, shape in self.shapes.items() if not name.endswith(HEAD)}
        return replace(self, shapes=body, vocabulary=1, is_tied=False)

    def frozen(self, patterns: tuple[str, ...]) -> int:
        """Count the parameters that ``optimisation.freeze`` names."""
        return sum(math.prod(s) for name, s in self.shapes.items() if any(fnmatchcase(name, each) for each in patterns))

    def linear(self) -> dict[str, tuple[int, ...]]:
        """List the decoder's linear layers with the shapes of their weights, without the output layer.

        Experts and routers of a mixture are none: transformers keeps them otherwise.
        """
        return {
            name.removesuffix(".weight"): shape
            for name, shape in self.shapes.items()
            if len(shape) == 2
            and name.endswith(".weight")
            and not any(each in name for each in (*NOT_ADAPTED, EXPERTS))
            and not name.endswith(ROUTERS)
        }

    def adapters(self, lora: LoraConfig) -> int:
        """Count the parameters of all A [r, in] and B [out, r]."""
        return sum(lora.rank * sum(shape) for shape in self.adapted(lora).values())

    def adapted(self, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
        """List the linear layers that have an adapter, with the shapes of their weights."""

        def is_named(name: str, parts: tuple[str, ...]) -> bool:
            return any(name == part or name.endswith(f".{part}") for part in parts)

        return {
            name: shape
            for name, shape in self.linear().items()
            if (lora.targets == "all-linear" or is_named(name, lora.targets)) and not is_named(name, lora.exclude)
        }


def read_sizes(directory: Path) -> ModelSizes:
    """Read a model's sizes; no weight is read.

    Raises:
        ModelError: the directory has no model, or its configuration does not name its sizes.
    """
    try:
        config: Any = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        shapes = shapes_in(safetensors_files(directory))
        return sizes_of(config, shapes)
    except (OSError, ValueError) as error:
        raise ModelError(f"the sizes of {directory} cannot be read: {error}") from error
    except FlotillaError as error:
        raise ModelError(f"the sizes of {directory} cannot be read: {error.detail}") from error


def sizes_of(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelSizes:
    """Take sizes from a configuration and the shapes of the weights.

    Raises:
        ModelError: the configuration does not name one.
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    try:
        hidden, heads, layers, vocabulary = (int(text[name]) for name in NAMED)
        dims = int(text.get("head_dim") or hidden // heads)
        inner = int(text.get("intermediate_size") or 4 * hidden)
        if chosen := text.get("num_experts_per_tok"):
            inner = int(chosen) * int(text.get("moe_intermediate_size") or inner)
        keys = int(text.get("num_key_value_heads") or heads) * dims
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"config.json does not say how large the model is: {error!r}") from error
    is_tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", True))) or not any(
        name.endswith(HEAD) for name in shapes
    )
    return ModelSizes(
        shapes={name: shape for name, shape in shapes.items() if not (is_tied and name.endswith(HEAD))},
        vocabulary=vocabulary,
        hidden=hidden,
        layers=layers,
        queries=heads * dims,
        keys=keys,
        inner=inner,
        is_tied=is_tied,
        has_head_norms=any(name.endswith("q_norm.weight") for name in shapes),
        is_gated="rms_norm_eps" in text,
    )
