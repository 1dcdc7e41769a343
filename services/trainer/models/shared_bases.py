"""The weights that adapters are added to, once in a process for all experiments that train there.

Each experiment has layers of its own around the same memory: adapters, freezing and what is done to a layer's forward
are its own. None of them writes into the base: what may train there publishes adapters alone (``rules``).
"""

import copy
import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from flotilla.services.trainer.models.loading import BaseKey, LoadedModel

log = logging.getLogger(__name__)


class SharedBases:
    """Loads each base once."""

    def __init__(self) -> None:
        self._loaded: dict[BaseKey, LoadedModel] = {}
        self._loading = threading.Lock()

    def model(self, key: BaseKey, load: Callable[[], LoadedModel]) -> LoadedModel:
        """Give an experiment its own layers around a base.

        Args:
            key: what the base is loaded of, and how.
            load: loads it, if it is not loaded yet.

        Raises:
            ModelError: as of ``load``.
        """
        with self._loading:
            is_new = key not in self._loaded
            if is_new:
                self._loaded[key] = load()
            base = self._loaded[key]
        log.info("base is shared", extra={"model": str(key[0]), "loaded": is_new})
        return replace(base, model=around_the_same(base.model))


def around_the_same(model: nn.Module) -> nn.Module:
    """Copy a model's layers, but none of its weights: their memory is that of the original's."""
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)
