"""Load a causal language model from a local directory, or raise an error with the reason."""

import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
)

from flotilla.services.trainer.models.quantised import check_installed, quantise
from flotilla.services.trainer.models.stored_weights import StoredWeights, without_memory
from flotilla.shared.config.sections.model import QuantisationConfig
from flotilla.shared.errors import ModelError
from flotilla.shared.models.hub import check_directory
from flotilla.shared.net.absence import absent_or
from flotilla.shared.vision.kinds import takes_images

LIGER = "liger"
PACKAGES = {
    "flash_attention_2": ("flash_attn", "flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3"),
    "flash_attention_4": ("flash_attn.cute", "flash-attn-4"),
}
"""The module that each implementation is in, and the package that has it."""
OWN_LOSS = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""Parts of Liger that stay out: log-probabilities of the sampled tokens are computed here, not a model's own loss."""


def check_attention(name: str, device: torch.device) -> None:
    """Check that an implementation of attention can compute here; whether a model has it transformers says.

    transformers would look for a missing one among the kernels of the hub: nothing is fetched from a network here.

    Raises:
        ModelError: its package or a GPU is missing.
    """
    if name not in PACKAGES:
        return
    module, package = PACKAGES[name]
    if device.type != "cuda":
        raise ModelError(f"model.attention: {name} computes on GPUs, and the trainer's device is {device}: use auto")
    if not _is_installed(module):
        raise ModelError(
            f"model.attention: {name} needs the package {package}, which is not installed beside this trainer: install "
            "it there, or use auto"
        )


def apply_kernels(name: str, model: nn.Module, device: torch.device) -> None:
    """Let a model's norms, gates and rotations compute with Liger's kernels, if the spec asks for it.

    Raises:
        ModelError: they are not installed, need a GPU, or do not have this architecture.
    """
    if name != LIGER:
        return
    if device.type != "cuda":
        raise ModelError(f"model.kernels: liger computes on GPUs, and the trainer's device is {device}: use auto")
    if not _is_installed("liger_kernel"):
        raise ModelError(
            "model.kernels: liger needs the package liger-kernel, which is not installed beside this trainer: install "
            "it there, or use auto"
        )
    kinds: dict[str, Any] = import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    kind = str(getattr(model.config, "model_type", None))
    if kind not in kinds:
        raise ModelError(f"model.kernels: the installed liger-kernel has none for models of type {kind}: use auto")
    known = inspect.signature(kinds[kind]).parameters
    kinds[kind](model=model, **{part: is_on for part, is_on in OWN_LOSS.items() if part in known})


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # nor is what it is a part of
        return False


log = logging.getLogger(__name__)

SCORE_HEAD = "score.weight"
AUTO = "auto"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    """A policy and where its tokenizer lies.

    Attributes:
        model: in evaluation mode (dropout would make its log-probs differ from the engine's), with gradients.
        source: the directory it was loaded from.
        stored: where its weights are, if they are not loaded: its parameters have no memory yet.
    """

    model: nn.Module
    source: Path
    stored: StoredWeights | None = None

    @property
    def takes_images(self) -> bool:
        """Whether it is a vision-language model."""
        return takes_images(self.source)

    @property
    def vocabulary(self) -> int:
        """Token ids that the model can read."""
        return int(self.model.get_input_embeddings().num_embeddings)  # type: ignore[operator]


BaseKey = tuple[Path, str, str, str]
"""What a base is loaded of, and how: directory, dtype, attention and kernels."""
Share = Callable[[BaseKey, Callable[[], LoadedModel]], LoadedModel]
"""Returns a model whose weights are shared; the function loads it if it is not loaded yet."""


def check_device(device: str) -> torch.device:
    """Find a device; ``auto`` is a GPU where torch sees one.

    Raises:
        ModelError: it does not exist here.
    """
    try:
        here = "cuda:0" if torch.cuda.is_available() else "cpu"
        found = torch.device(here if device == AUTO else device)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"device {device} cannot be used: {first_line}") from None
    return found


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == AUTO:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[name]


def load_model(
    path: Path,
    *,
    dtype: str,
    device: torch.device,
    scores: bool = False,
    in_parts: bool = False,
    attention: str = AUTO,
    kernels: str = AUTO,
    quantisation: QuantisationConfig | None = None,
) -> LoadedModel:
    """Load config, weights and tokenizer; nothing is ever fetched from a network.

    Args:
        path: a directory in Hugging Face format.
        dtype: float32, bfloat16, or auto: bfloat16 on a GPU, else float32.
        device: where the weights go.
        scores: as a sequence classifier with one output, whose head is made where the weights have none.
        in_parts: leave the weights where they are, if a rank can read its part of them by itself.
        attention, kernels: what computes it; see ``ModelConfig``.
        quantisation: how the weights of linear layers are packed; then it is read layer by layer, and not in parts.

    Raises:
        ModelError: something is missing or does not fit; one sentence names it.
    """
    if quantisation is not None:
        check_installed()
    check_directory(path)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise absent_or(
            error, ModelError(f"{path}: config or tokenizer cannot be read: {_first_line(error)}")
        ) from error
    if scores:
        config.num_labels = 1
        # What a classifier of transformers finds the last token of a padded row by.
        config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    wanted = _dtype(dtype, device)
    if attention != AUTO:
        check_attention(attention, device)
        config._attn_implementation = attention
    reads_by_layer = in_parts or quantisation is not None
    found = without_weights(path, config, wanted, scores=scores) if reads_by_layer else None
    model = _load_weights(path, config, wanted, scores=scores) if found is None else found.model
    if quantisation is not None:
        quantise(model, quantisation, None if found is None else found.stored)
    apply_kernels(kernels, model, device)
    if found is not None and quantisation is None:
        return found
    return LoadedModel(model.to(device).eval(), path)


def check_overrides(config: Any, overrides: Mapping[str, Any], field: str = "model.overrides") -> None:
    """Check that a model's kind knows the keys of its config that a spec overrides.

    Args:
        config: of the loaded model.
        overrides: by key; a mapping where the config has a section.
        field: the spec's, for the message.

    Raises:
        ModelError: it does not know one.
    """
    known = type(config)()
    for key, value in overrides.items():
        if not hasattr(known, key):
            raise ModelError(f"{field}: {known.model_type or type(config).__name__} has no {key}: leave it out")
        if isinstance(value, Mapping) and isinstance(section := getattr(config, key), PreTrainedConfig):
            check_overrides(section, value, f"{field}.{key}")


def without_weights(path: Path, config: Any, dtype: torch.dtype, *, scores: bool = False) -> LoadedModel | None:
    """Make a model whose weights are to be read in parts; None where transformers has to load it.

    Args:
        path: a directory in Hugging Face format.
        config: read from there.
        dtype: of the weights.
        scores: see ``load_model``.
    """
    kind = _kind_of(path, scores=scores)
    try:
        with without_memory():
            model = kind.from_config(config, dtype=dtype)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        log.info("model cannot be made without its weights", extra={"path": str(path), "error": repr(error)})
        return None
    if dtype != torch.float32 and getattr(model, "_keep_in_fp32_modules_strict", None):
        return None
    if model.can_generate():
        # The defaults of a model that is made from its configuration are there already.
        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    made = {SCORE_HEAD: _drawn_head(model.score)} if scores else {}
    stored = StoredWeights.of(model, path, made)
    return None if stored is None else LoadedModel(model.eval(), path, stored)


def _kind_of(path: Path, *, scores: bool) -> Any:
    if scores:
        return AutoModelForSequenceClassification
    return AutoModelForImageTextToText if takes_images(path) else AutoModelForCausalLM


def _load_weights(path: Path, config: Any, dtype: torch.dtype, *, scores: bool) -> nn.Module:
    kind = _kind_of(path, scores=scores)
    try:
        model, report = kind.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except MemoryError:
        raise
    # transformers raises whatever a broken file leads to, safetensors an error of its own that derives from Exception.
    except Exception as error:
        raise absent_or(error, ModelError(f"{path}: weights cannot be loaded: {_first_line(error)}")) from error
    missing = sorted(map(str, report.get("missing_keys") or ()))
    if scores and missing == [SCORE_HEAD]:
        _make_head(model.score)
        missing = []
    if missing:
        raise ModelError(f"{path}: the weights lack {len(missing)} tensors of the config's model, such as {missing[0]}")
    mismatched = sorted(str(entry) for entry in report.get("mismatched_keys") or ())
    if mismatched:
        raise ModelError(f"{path}: tensors have other shapes than the config says, such as {mismatched[0]}")
    loaded: nn.Module = model
    return loaded


@torch.no_grad()
def _make_head(head: nn.Module) -> None:
    """Fill a new head, the same each time: small, so that all scores are close together at first."""
    assert isinstance(head, nn.Linear)
    head.weight.copy_(_drawn_head(head).to(head.weight))


def _drawn_head(head: nn.Linear) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(head.weight.shape, generator=generator) / (head.in_features + 1)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
