"""Opens a model directory: chooses the decoder that can run it, and names the cause when none can."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flotilla.services.rollout.engines.decoders.architecture import (
    Architecture,
    architecture_of,
    is_written_out,
    reason_not_fused,
)
from flotilla.services.rollout.engines.decoders.base import Decoder
from flotilla.services.rollout.engines.decoders.checkpoint import read_config
from flotilla.services.rollout.engines.decoders.flash_attention import attention_here
from flotilla.services.rollout.engines.decoders.fused import FusedDecoder
from flotilla.services.rollout.engines.decoders.paged import PagedDecoder, works
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.shared.errors import ModelError, WeightTransferFailed
from flotilla.shared.models.weight_files import safetensors_files
from flotilla.shared.net.absence import absent_or
from flotilla.shared.vision.processor import ImageProcessor

if TYPE_CHECKING:
    from flotilla.services.rollout.engines.decoders.generic import WholeScorer

log = logging.getLogger(__name__)

FLASH_HEAD_DIM = 256
"""The widest head that FlashAttention-2 has."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A decoder and the complete configuration of its model.

    ``scorer`` computes log-probabilities with the trainer's bits, where the settings ask for it.
    """

    decoder: Decoder
    config: Mapping[str, Any]
    scorer: "WholeScorer | None" = None


def load_decoder(settings: EngineSettings) -> LoadedModel:
    """Load a model with the fastest decoder that can run it.

    Raises:
        ModelError: the directory, its configuration or its weights do not make a model, or the device is not there.
    """
    directory = Path(settings.model_path)
    config = read_config(directory)
    device = _device(settings.device)
    if not is_written_out(config):
        config = _complete(directory, config)
    if settings.is_exact:
        if device.type != "cpu":
            raise ModelError(
                f"exactness bitwise is computed on a CPU, and the engine's device is {device}: set it to cpu"
            )
        return _by_transformers(directory, settings, device, config)
    reason = reason_not_fused(config)
    if reason is None and settings.records_experts:
        raise ModelError(
            f"algorithm.router_replay R3 needs a mixture of experts, and {directory} has none: set it to null"
        )
    if reason is None:
        return LoadedModel(_fused(directory, config, settings, device), config)
    if settings.batch_invariant:
        raise ModelError(
            f"rollout.engine.batch_invariant needs the fused forward, which cannot run {directory}: {reason}; "
            "set batch_invariant to false"
        )
    log.info("the fused forward cannot run this model", extra={"reason": reason})
    return _by_transformers(directory, settings, device, config)


def _fused(directory: Path, config: Mapping[str, Any], settings: EngineSettings, device: torch.device) -> Decoder:
    try:
        architecture, files = architecture_of(config), safetensors_files(directory)
        if device.type == "cuda" and (paged := _paged(architecture, files, settings, device)) is not None:
            return paged
        return FusedDecoder(
            architecture,
            files,
            dtype=DTYPES[settings.dtype],
            device=device,
            num_rows=settings.slots,
            context_tokens=settings.context_tokens,
            may_be_native=True,
        )
    except (WeightTransferFailed, ValueError, TypeError) as error:
        raise absent_or(error, ModelError(f"model {directory} cannot be loaded: {error}")) from error


def _paged(
    architecture: Architecture, files: list[Path], settings: EngineSettings, device: torch.device
) -> PagedDecoder | None:
    """Make the decoder for GPUs if FlashAttention takes the model, and it is found to work here; else None."""
    dtype = DTYPES[settings.dtype]
    if dtype is torch.float32 or architecture.head_dim % 8 or architecture.head_dim > FLASH_HEAD_DIM:
        return None
    try:
        attention, page_tokens = attention_here(settings.context_tokens)
        decoder = PagedDecoder(
            architecture,
            files,
            dtype=dtype,
            device=device,
            num_rows=settings.slots,
            context_tokens=settings.context_tokens,
            attention=attention,
            page_tokens=page_tokens,
        )
        return decoder if works(decoder) else None
    except WeightTransferFailed:
        raise
    except Exception as error:  # Whatever a driver or a build of torch lacks, the fused forward does without it.
        log.warning("the paged forward does not work on this device", extra={"error": repr(error)})
        return None


def _by_transformers(
    directory: Path, settings: EngineSettings, device: torch.device, config: Mapping[str, Any]
) -> LoadedModel:
    # Imported here: transformers takes seconds to import, and the fused forward does without it.
    from flotilla.services.rollout.engines.decoders.generic import (
        CachedDecoder,
        RecomputingDecoder,
        WholeScorer,
        choose_decoder,
        load_model,
    )
    from flotilla.services.rollout.engines.decoders.illustrated import RecomputingVisionDecoder, VisionDecoder
    from flotilla.services.rollout.engines.decoders.routed import RecordingDecoder
    from flotilla.shared.models.routers import Routing

    dtype = DTYPES[settings.dtype]
    files = safetensors_files(directory)
    make_cached: Callable[..., CachedDecoder] = CachedDecoder
    make_plain: Callable[..., RecomputingDecoder] = RecomputingDecoder
    if settings.image_pixels is not None:
        least, most = settings.image_pixels
        processor = ImageProcessor.from_directory(directory, min_pixels=least, max_pixels=most)
        make_cached, make_plain = partial(VisionDecoder, processor), partial(RecomputingVisionDecoder, processor)
    model = load_model(directory, dtype, device)
    if settings.records_experts:
        make_cached = partial(RecordingDecoder, Routing(model))
    decoder = choose_decoder(model, dtype, settings.slots, files, make_cached, make_plain)
    if settings.records_experts and not isinstance(decoder, RecordingDecoder):
        raise ModelError(
            f"algorithm.router_replay R3 does not work with {type(model).__name__} here, which is computed without a "
            "cache: what its routers choose is not recorded"
        )
    return LoadedModel(decoder, config, WholeScorer(model) if settings.is_exact else None)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"device {name!r} is not known: use cpu or cuda:0") from error
    if device.type not in {"cpu", "cuda"}:
        raise ModelError(f"device {name!r} is not supported: use cpu or cuda:0")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {name!r} is not available on this machine: use cpu")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ModelError(f"device {name!r} is not available: torch sees {count} here, cuda:0 to cuda:{count - 1}")
        # Captures and events are made on the current device.
        torch.cuda.set_device(device.index or 0)
    return device


def _complete(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Add the defaults of the model's class, as transformers knows them."""
    from transformers import AutoConfig

    try:
        completed: dict[str, Any] = AutoConfig.from_pretrained(directory, local_files_only=True).to_dict()
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"config.json of {directory} (model_type {config.get('model_type')}) cannot be used: {error}"
        ) from error
    return completed
