"""A model's directory with other values in its config.json: links to all of its files beside a config of its own.

What reads it (trainer, engines, servers, tokenizers, checks) needs to know of no override. It is made of the model and
the values alone, so processes that make it at once make the same.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import JsonValue

from flotilla.shared.errors import ModelError

CONFIG = "config.json"


def overridden_directory(directory: Path, overrides: Mapping[str, JsonValue]) -> Path:
    """Return a directory with a model's files, whose config.json has other values; made if it is not there.

    Args:
        directory: of the model. Where it has no config.json it is returned as it is.
        overrides: values by the config's keys; a mapping changes the keys below it alone.

    Raises:
        ModelError: the config is no JSON object, or the directory cannot be made.
    """
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return directory
    except (OSError, ValueError) as error:
        raise ModelError(f"config.json of {directory} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"config.json of {directory} is not a JSON object")
    text = json.dumps(_merged(config, overrides), indent=2, sort_keys=True) + "\n"
    name = hashlib.sha256(f"{directory.resolve()}\n{text}".encode()).hexdigest()[:32]
    made = cache_directory() / name
    try:
        link_with_config(directory, text, made)
    except OSError as error:
        raise ModelError(f"model.overrides: {made} cannot be made: {error.strerror or error}") from error
    return made


def link_with_config(directory: Path, config: str, made: Path) -> None:
    """Fill a directory with links to a model's files beside another config.json.

    Args:
        directory: of the model.
        config: text of the config.json; one that is there stays.
        made: made if it is not there.

    Raises:
        OSError: it cannot be filled.
    """
    made.mkdir(parents=True, exist_ok=True)
    # Each time: a hub's model comes file by file, the weights last.
    for link in made.iterdir():
        if link.is_symlink() and not link.exists():  # the model has lost that file
            link.unlink(missing_ok=True)
    for file in directory.resolve().iterdir():
        if file.name != CONFIG:
            with suppress(FileExistsError):
                (made / file.name).symlink_to(file)
    if not (made / CONFIG).is_file():
        unfinished = made / f".{CONFIG}.{secrets.token_hex(8)}"
        unfinished.write_text(config, encoding="utf-8")
        unfinished.replace(made / CONFIG)


def cache_directory() -> Path:
    """Return where such directories are."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "flotilla" / "models"


def _merged(config: Mapping[str, JsonValue], overrides: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    found = dict(config)
    for key, given in overrides.items():
        value, below = given, found.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            value = _merged(below, value)
        found[key] = value
    return found
