"""Kernels that other packages bring along, where they are installed: attention by name, and Liger's layers."""

import inspect
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from flotilla.shared.errors import ModelError

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
    """Let a model's norms, gates and rotations compute with Liger's kernels, if the spec says so.

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
