"""Engines over tiny random models, one model of each family for the whole run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from flotilla.services.rollout.engines.embedded.engine import TorchEngine
from flotilla.services.rollout.engines.settings import EngineSettings
from tests.contract.engine.models import save_model


@dataclass(frozen=True)
class SavedModel:
    path: Path
    model: nn.Module

    def engine(self, *, goes_ahead: bool | None = None, **settings: Any) -> TorchEngine:
        sized = EngineSettings(str(self.path), **{"slots": 16, "context_tokens": 128, **settings})
        return TorchEngine(sized, goes_ahead=goes_ahead)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SavedModel]:
    """Return a family's model, saved once."""
    models: dict[str, SavedModel] = {}

    def give(family: str) -> SavedModel:
        if family not in models:
            path = tmp_path_factory.mktemp(family)
            models[family] = SavedModel(path, save_model(family, path))
        return models[family]

    return give
