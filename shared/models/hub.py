"""Where a model is on this machine: a directory, or a hub name whose files are in the hub's cache.

Every process that loads a model calls ``fetched`` first: on one machine the first one downloads and the others find it
there, on several each has a cache of its own. The gateway writes the commit into the spec when an experiment is
created, so all load the same files, also after a restart. A model that is whole in the cache is used without asking any
network.
"""

import json
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from flotilla.shared.children.calls import CallProcess, running
from flotilla.shared.children.processes import python_module
from flotilla.shared.config.sections.model import ModelConfig
from flotilla.shared.errors import DeadlineExceeded, FlotillaError, ModelError, Unavailable, WorkerDied
from flotilla.shared.models.overridden import overridden_directory
from flotilla.shared.net.absence import absent_or

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER = "adapter_model.safetensors"
"""The files of an adapter, as peft writes and reads them."""


def check_directory(path: Path) -> None:
    """Find the files of a model without loading it.

    Raises:
        ModelError: the directory, its config.json, its weights or its tokenizer are missing.
    """
    if not path.is_dir():
        raise ModelError(f"model directory {path} does not exist")
    config = path / "config.json"
    if not config.is_file():
        raise ModelError(f"model directory {path} has no config.json")
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise absent_or(error, ModelError(f"{config} is not readable JSON: {error}")) from None
    weights = {each.name for each in path.glob("*.safetensors")}
    if weights == {ADAPTER}:
        raise ModelError(
            f"model directory {path} has an adapter without the weights that it is added to: write both as one model "
            f"with flotilla export {path} DIRECTORY, and name that"
        )
    if not weights:
        raise ModelError(f"model directory {path} has no *.safetensors weights (pickled weights are not loaded)")
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise ModelError(f"model directory {path} has no tokenizer (tokenizer.json or tokenizer.model)")


log = logging.getLogger(__name__)

COMMIT = re.compile(r"[0-9a-f]{40}")
INDEX = "model.safetensors.index.json"
LOG_SECONDS = 5.0

Progress = Callable[[int, int], None]
"""Called with bytes done and total bytes."""


def cache_directory() -> Path:
    """Return where huggingface_hub keeps what it downloads."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def repository_directory(name: str) -> Path:
    """Return where the cache keeps one model."""
    return cache_directory() / f"models--{name.replace('/', '--')}"


def model_directory(model: ModelConfig) -> Path:
    """Return the directory that a model is loaded from, whether or not its files are there.

    With ``overrides`` it is one whose config.json has them, beside links to the files.

    Raises:
        ModelError: a hub's branch of which the cache does not know the commit; ``fetched`` would have found it. Or the
            directory with overrides cannot be made.
    """
    directory = _stored_directory(model)
    return overridden_directory(directory, model.overrides) if model.overrides else directory


def _stored_directory(model: ModelConfig) -> Path:
    if not model.is_hub_name:
        return Path(model.path)
    repository = repository_directory(model.path)
    revision = model.revision or "main"
    if COMMIT.fullmatch(revision):
        return repository / "snapshots" / revision
    try:
        commit = (repository / "refs" / revision).read_text(encoding="ascii").strip()
    except OSError:
        raise ModelError(f"model.path {model.path} ({revision}) is not in the cache {repository}") from None
    return repository / "snapshots" / commit


def is_whole(directory: Path) -> bool:
    """Whether config and all weights are there; smaller files are downloaded before those."""
    if not (directory / "config.json").is_file():
        return False
    try:
        index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return any(directory.glob("*.safetensors"))
    except (OSError, ValueError):
        return False
    return all((directory / name).is_file() for name in set(index["weight_map"].values()))


def _process(model: ModelConfig) -> CallProcess:
    command = python_module("flotilla.shared.models.download")
    return CallProcess(command, None, f"the download of {model.path}", blames_opening=False)


def _explained(error: FlotillaError) -> FlotillaError:
    # A killed process does not mean a bad model: another one continues where it was.
    kind = Unavailable if isinstance(error, WorkerDied | DeadlineExceeded) else type(error)
    return kind(f"model.path: {error.detail}")


async def fetched(model: ModelConfig, on_progress: Progress | None = None) -> Path:
    """Make sure that all of a model is on this machine, and return its directory.

    Args:
        on_progress: called about once per second during the download; None: progress is logged.

    Raises:
        ModelError: there is no such model or revision, or the hub refuses it.
        Unavailable: the hub cannot be reached; what has come is kept, and another call continues with it.
    """
    if not model.is_hub_name:
        return model_directory(model)
    if _is_here(model):
        return model_directory(model)
    tell = on_progress or _logging(model.path)
    process = _process(model)
    try:
        await process.start()
        commit = await process.call([model.path, model.revision, False], on_progress=lambda told: tell(*told))
    except FlotillaError as error:
        raise _explained(error) from None
    finally:
        await process.aclose()
    return model_directory(model.model_copy(update={"revision": commit}))


def fetch_small(model: ModelConfig) -> str:
    """Download config and tokenizer of a hub's model; blocks. Returns the commit.

    Raises:
        ModelError: as ``fetched``; also where the hub cannot be reached.
    """
    try:
        with running(_process(model)) as calls:
            return str(calls.call([model.path, model.revision, True], seconds=None))
    except FlotillaError as error:
        if not isinstance(explained := _explained(error), Unavailable):
            raise explained from None
        if has_config(model):
            return _stored_directory(model).name
        raise ModelError(explained.detail) from None


def has_config(model: ModelConfig) -> bool:
    """Whether the small files of a model have come, of which the config is one."""
    try:
        return (_stored_directory(model) / "config.json").is_file()
    except ModelError:
        return False


def _is_here(model: ModelConfig) -> bool:
    try:
        return is_whole(_stored_directory(model))
    except ModelError:
        return False


def _logging(name: str) -> Progress:
    last = 0.0

    def tell(done_bytes: int, total_bytes: int) -> None:
        nonlocal last
        if time.monotonic() - last >= LOG_SECONDS:
            last = time.monotonic()
            facts = {"model": name, "done_bytes": done_bytes, "total_bytes": total_bytes}
            log.info("the model is downloaded", extra=facts)

    return tell
