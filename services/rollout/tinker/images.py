"""Weight images of saved models: the base's weights, with an adapter added where one was saved."""

from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flotilla.shared.errors import ModelError, NotFound, Unavailable
from flotilla.shared.models.hub import ADAPTER, ADAPTER_CONFIG
from flotilla.shared.models.weight_files import safetensors_files
from flotilla.shared.net.absence import absent_or
from flotilla.shared.tinker.records import MANIFEST, Record, Saved
from flotilla.shared.weights.image.adapted import added_to
from flotilla.shared.weights.image.adapters import AdaptersHeader, names_of, weight_of


class Adapter(Record):
    """The needed part of ``adapter_config.json``."""

    r: int
    lora_alpha: float
    fan_in_fan_out: bool = False


def write_image(base: Path, saved: Path | None, image: Path) -> int:
    """Write an image of a saved model; None: of the base. Returns how many updates its weights had.

    Raises:
        NotFound: the saved model is not there, or another one took its place meanwhile.
        ModelError: it cannot be read, or is of another model.
        Unavailable: the image cannot be written, such as on a full disk.
    """
    try:
        tensors, step = (_tensors(base), 0) if saved is None else _with(base, saved)
    except FileNotFoundError as error:
        if saved is None:
            raise ModelError(f"the base model cannot be read: {error}") from error
        raise NotFound(f"{saved.name}: the saved model was deleted or replaced meanwhile") from None
    except (OSError, SafetensorError, ValidationError, KeyError) as error:
        raise absent_or(error, ModelError(f"the saved model cannot be read: {error}")) from error
    try:
        save_file(tensors, image)
    except (OSError, SafetensorError) as error:
        raise Unavailable(f"the weights that are sampled from cannot be written: {error}") from error
    return step


def read_manifest(saved: Path) -> Saved:
    """Read what a saved model is.

    Raises:
        NotFound: it is not there.
        ModelError: it cannot be read.
    """
    try:
        return Saved.model_validate_json((saved / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise NotFound(f"{saved.name}: there is no saved model of this name, or it was deleted") from None
    except (OSError, ValidationError) as error:
        raise ModelError(f"the saved model cannot be read: {error}") from error


def adapter_scale(saved: Path) -> float:
    """Read the factor of B A of a saved model that is an adapter.

    Raises:
        ModelError: it cannot be read.
    """
    try:
        config = _config(saved)
    except (OSError, ValueError) as error:
        raise absent_or(error, ModelError(f"{ADAPTER_CONFIG} cannot be read: {error}")) from error
    return config.lora_alpha / config.r


def _config(saved: Path) -> Adapter:
    return Adapter.model_validate_json((saved / ADAPTER_CONFIG).read_bytes())


def _with(base: Path, saved: Path) -> tuple[dict[str, Tensor], int]:
    manifest = read_manifest(saved)
    tensors = _whole(saved) if manifest.lora is None else _adapted(base, saved)
    if read_manifest(saved) != manifest:
        raise NotFound(f"{saved.name}: the saved model was replaced meanwhile")
    return tensors, manifest.step


def _whole(saved: Path) -> dict[str, Tensor]:
    with safe_open(saved / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _adapted(base: Path, saved: Path) -> dict[str, Tensor]:
    tensors = _tensors(base)
    config = _config(saved)
    with safe_open(saved / ADAPTER, framework="pt") as file:
        header = AdaptersHeader("", config.lora_alpha / config.r, config.fan_in_fan_out)
        for weight in {found for name in file.keys() if (found := weight_of(name)) is not None}:  # noqa: SIM118
            low, high = (file.get_tensor(name).float() for name in names_of(weight))
            tensors[weight] = added_to(tensors[weight], low, high, header)
    return {name: each.contiguous() for name, each in tensors.items()}


def _tensors(base: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in safetensors_files(base):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def use_one_thread() -> None:
    """Leave the cores to the engine and the trainer: what is added here is small."""
    torch.set_num_threads(1)
