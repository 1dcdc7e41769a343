"""Weight images as torch tensors: views of the mapped bytes, never copies."""

import ctypes
import mmap
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from flotilla.shared.schemas.publication import TensorSpec
from flotilla.shared.weights.image.files import open_shared
from flotilla.shared.weights.image.image import layout_of

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F32": torch.float32,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
SAFETENSORS_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def host_memory(address: int, num_bytes: int) -> memoryview:
    """View bytes of a tensor or storage on the host, which has to outlive the view.

    Not by numpy, after which torch refuses to resize the storage: a trainer that shares its device does.
    """
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def open_image(path: Path) -> dict[str, Tensor]:
    """Map an image and view each tensor of it by name; the file stays locked against writers while one of them lives.

    Writing to a tensor changes this process's private copy of the page, never the file.

    Raises:
        WeightTransferFailed: there is no such image, or it is being written, or malformed.
    """
    with open_shared(path) as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return {spec.name: view_of(mapped, spec) for spec in layout_of(mapped).tensors}


def flat_view(mapped: mmap.mmap, dtype: str, start: int, num_elements: int) -> Tensor:
    """View a run of elements of a mapping as one tensor of one dimension; ``start`` counts bytes."""
    if num_elements == 0:
        return torch.empty(0, dtype=TORCH_DTYPES[dtype])
    return torch.frombuffer(mapped, dtype=TORCH_DTYPES[dtype], count=num_elements, offset=start)


def view_of(mapped: mmap.mmap, spec: TensorSpec) -> Tensor:
    """View one tensor of a mapped image."""
    dtype = TORCH_DTYPES[spec.dtype]
    return flat_view(mapped, spec.dtype, spec.start, (spec.end - spec.start) // dtype.itemsize).view(spec.shape)


def on_wire(dtype: torch.dtype, wire_dtype: torch.dtype | None) -> torch.dtype:
    """Return as which dtype a tensor travels: only floating-point ones are ever cast."""
    return wire_dtype if wire_dtype is not None and dtype.is_floating_point else dtype


def safetensors_name(dtype: torch.dtype) -> str:
    """Name a dtype as safetensors does.

    Raises:
        ValueError: images do not hold that dtype.
    """
    try:
        return SAFETENSORS_NAMES[dtype]
    except KeyError:
        raise ValueError(f"weight images do not hold {dtype}") from None
