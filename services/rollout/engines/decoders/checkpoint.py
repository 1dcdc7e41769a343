"""Reads Hugging Face model directories and weight images: configuration, names, shapes and tensors."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from flotilla.shared.errors import ModelError, WeightTransferFailed
from flotilla.shared.net.absence import absent_or

if TYPE_CHECKING:
    from torch import Tensor

LOADABLE_DTYPES = frozenset({"F32", "BF16", "F16"})


def read_config(directory: Path) -> dict[str, Any]:
    """Read ``config.json``.

    Raises:
        ModelError: there is no such directory or file, or it is not a JSON object.
    """
    if not directory.is_dir():
        raise ModelError(f"model directory {directory} does not exist")
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"model directory {directory} has no config.json") from None
    except (OSError, ValueError) as error:
        raise absent_or(error, ModelError(f"config.json of {directory} cannot be read: {error}")) from error
    if not isinstance(config, dict):
        raise ModelError(f"config.json of {directory} is not a JSON object")
    return config


def read_eos_token_ids(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Find the tokens that end a completion: ``generation_config.json`` goes before ``config.json``."""
    found = config.get("eos_token_id")
    try:
        generation = json.loads((directory / "generation_config.json").read_text(encoding="utf-8"))
        found = generation.get("eos_token_id", found)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise absent_or(error, ModelError(f"generation_config.json of {directory} cannot be read: {error}")) from error
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor's entry in a file: its safetensors dtype (such as "F32") and its shape."""

    dtype: str
    shape: tuple[int, ...]


class TensorSource:
    """The tensors of one or more open safetensors files, read one at a time.

    Args:
        handles: what ``safe_open`` gave for each file.
    """

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handle_of = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118
        self.metadata: dict[str, str] = {}
        """The files' metadata."""
        for handle in handles:
            self.metadata |= handle.metadata() or {}
        self.headers: dict[str, TensorHeader] = {}
        for name, handle in self._handle_of.items():
            view = handle.get_slice(name)
            self.headers[name] = TensorHeader(view.get_dtype(), tuple(view.get_shape()))

    def read(self, name: str) -> "Tensor":
        """Read a tensor; it may be a view of the file, so copy it before the source closes."""
        tensor: Tensor = self._handle_of[name].get_tensor(name)
        return tensor


@contextmanager
def open_tensors(files: Sequence[Path]) -> Iterator[TensorSource]:
    """Open safetensors files; their headers are checked against their sizes.

    Raises:
        WeightTransferFailed: a file is missing, truncated or no safetensors file.
    """
    with ExitStack() as stack:
        yield _opened(files, stack, "pt")


def read_headers(files: Sequence[Path]) -> dict[str, TensorHeader]:
    """Read names, dtypes and shapes, without torch.

    Raises:
        WeightTransferFailed: a file is missing, truncated or no safetensors file.
    """
    with ExitStack() as stack:
        return _opened(files, stack, "np").headers


def _opened(files: Sequence[Path], stack: ExitStack, framework: str) -> TensorSource:
    try:
        return TensorSource([stack.enter_context(safe_open(file, framework=framework)) for file in files])
    except (OSError, SafetensorError) as error:
        raise WeightTransferFailed(f"weights in {', '.join(map(str, files))} cannot be read: {error}") from error


def check_headers(
    headers: Mapping[str, TensorHeader], expected: Mapping[str, tuple[int, ...]], *, optional: frozenset[str]
) -> None:
    """Check that tensors fit a model, before any is read.

    Args:
        headers: what the files hold.
        expected: name to shape of every tensor that the model has.
        optional: names that may be missing, or be there beyond ``expected``.

    Raises:
        WeightTransferFailed: a name is missing or unknown, or a shape or dtype does not fit; names the first of each.
    """
    missing = sorted(expected.keys() - headers.keys() - optional)
    unknown = sorted(headers.keys() - expected.keys() - optional)
    if missing or unknown:
        parts = [
            f"{len(names)} {kind} (first: {names[0]})"
            for kind, names in (("missing", missing), ("unknown", unknown))
            if names
        ]
        raise WeightTransferFailed(f"the names of the tensors do not fit the model: {', '.join(parts)}")
    for name, header in headers.items():
        if name not in expected:
            continue
        if header.shape != expected[name]:
            raise WeightTransferFailed(f"{name} has shape {list(header.shape)}, the model needs {list(expected[name])}")
        if header.dtype not in LOADABLE_DTYPES:
            raise WeightTransferFailed(
                f"{name} has dtype {header.dtype}, allowed are {', '.join(sorted(LOADABLE_DTYPES))}"
            )
