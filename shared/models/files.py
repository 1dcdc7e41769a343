"""The files of a model in Hugging Face format, looked at without loading anything: no torch here."""

import json
from pathlib import Path

from flotilla.shared.errors import ModelError
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
