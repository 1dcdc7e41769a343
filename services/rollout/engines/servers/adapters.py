"""Adapters that a server adds to its weights itself: the folders that it reads them from, and their names there.

Each version has a name of its own, which no other has had, so that no cache of the server's mixes two. The server's
weights are those of the model's files throughout. It has two adapters at most: the one that requests are sampled with,
and the next one, which is loaded while they are.
"""

import asyncio
import itertools
import json
import logging
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from flotilla.services.rollout.engines.decoders.adapter_files import adapted_weights, check_base, header_in
from flotilla.services.rollout.engines.decoders.checkpoint import TensorHeader
from flotilla.services.rollout.engines.servers.client import Refused
from flotilla.services.rollout.engines.servers.dialect import Adapting, Body, Caller
from flotilla.services.rollout.engines.servers.settings import ServerSettings
from flotilla.shared.errors import FlotillaError, Unavailable, WeightTransferFailed
from flotilla.shared.models.weight_files import safetensors_files
from flotilla.shared.weights.image.adapters import names_of
from flotilla.shared.weights.image.layout import read_layout

log = logging.getLogger(__name__)

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
MAX_HELD = 2
"""Adapters that a server has at a time."""


class ServedAdapters:
    """The adapters of one server.

    Args:
        host: how it is asked.
        settings: of the engine, with ``adapters``.
        place: directory for their folders, private to this user.

    Attributes:
        serving: name of what requests are sampled with; None: the weights alone.
    """

    def __init__(self, host: Adapting, settings: ServerSettings, place: Path) -> None:
        self.host = host
        self.serving: str | None = None
        self._settings, self._place = settings, place
        self._held: dict[str, Path] = {}
        self._numbers = itertools.count(1)

    async def stage(self, shapes: Mapping[str, tuple[int, ...]], image: Path, label: str) -> str:
        """Make the folder of a version.

        Args:
            shapes: of the model's weights.
            image: of adapters alone; it may vanish as soon as this returns.
            label: of the version.

        Returns:
            The adapters' name.

        Raises:
            WeightTransferFailed: they do not fit.
            Unavailable: there is no place for the folder.
        """
        settings = self._settings
        assert settings.adapters is not None
        name = f"{settings.adapters.name}-{label}-{next(self._numbers)}"
        self._held[name] = await asyncio.to_thread(stage_adapters, self._place, settings, shapes, image)
        return name

    async def load(self, caller: Caller, name: str) -> None:
        """Have the server load what was staged beside what serves, which continues.

        Raises:
            WeightTransferFailed: it refuses it; what serves continues.
            Unavailable, DeadlineExceeded, WorkerDied: its state is unknown now.
        """
        try:
            await self.host.load(caller, name, self._held[name], seconds=self._settings.load_seconds)
        except Refused as error:
            raise WeightTransferFailed(f"the server does not take the adapters {name}: {error.detail}") from error

    async def held_by(self, caller: Caller) -> Mapping[str, str]:
        """Ask the server for the hashes of what it loaded last; see ``Adapting.hashes``."""
        settings = self._settings
        assert settings.adapters is not None
        return await self.host.hashes(caller, settings.adapters.rank, seconds=settings.load_seconds)

    def files(self, name: str) -> tuple[list[Path], Path]:
        """Name the files of the weights, and the one of adapters that are added to them."""
        return safetensors_files(self._settings.model_path), self._held[name] / WEIGHTS_FILE

    async def forget_others(self, caller: Caller) -> None:
        """Have the server forget what does not serve, and remove its folders; no request may have it any more."""
        for name in [each for each in self._held if each != self.serving]:
            directory = self._held.pop(name)
            try:
                await self.host.unload(caller, name)
            except FlotillaError as error:
                # It was never there, or the server drops it by itself for the next but one.
                log.info("an adapter was not unloaded", extra={"adapter": name, "cause": error.detail})
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    def asked_with(self, body: Body) -> Body:
        """Have the request for a completion be sampled with what serves."""
        return body if self.serving is None else self.host.asked_with(body, self.serving)


def stage_adapters(place: Path, settings: ServerSettings, shapes: Mapping[str, tuple[int, ...]], image: Path) -> Path:
    """Make a folder as peft writes it of an image of adapters alone.

    Args:
        place: where it is made; each call makes another one.
        settings: of the engine.
        shapes: of the model's weights.
        image: its tensors have peft's names.

    Raises:
        WeightTransferFailed: it holds something else, or its adapters are not for these weights.
        Unavailable: the folder cannot be made now.
    """
    model = settings.model_path
    config = _config_of(image, settings, shapes) | {"base_model_name_or_path": str(model)}
    made = None
    try:
        made = Path(tempfile.mkdtemp(prefix="adapters-", dir=place))
        shutil.copyfile(image, made / WEIGHTS_FILE)
        (made / CONFIG_FILE).write_text(json.dumps(config, indent=1), encoding="utf-8")
    except OSError as error:
        if made is not None:  # the disk may be full, and each try would take as much of it
            shutil.rmtree(made, ignore_errors=True)
        raise Unavailable(f"no folder can be made to load adapters from, in {place}: {error}") from error
    return made


def _config_of(image: Path, settings: ServerSettings, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    """Check an image, and describe it as peft's ``adapter_config.json`` does."""
    layout = read_layout(image)
    header = header_in(layout.metadata)
    if header is None:
        raise WeightTransferFailed(
            "the image holds whole weights, and the server was started to add adapters to those that it has: set "
            "asynchrony.publication.lora to merged"
        )
    if header.is_transposed:
        raise WeightTransferFailed(
            "the adapters are of transposed weights, as GPT-2's are, which servers do not take: set "
            "asynchrony.publication.lora to merged"
        )
    check_base(safetensors_files(settings.model_path), header)
    tensors = {spec.name: TensorHeader(spec.dtype, spec.shape) for spec in layout.tensors}
    weights = adapted_weights(tensors, shapes, is_transposed=False)
    ranks = {tensors[names_of(each)[0]].shape[0] for each in weights}
    wanted = settings.adapters.rank if settings.adapters is not None else None
    if ranks != {wanted}:
        raise WeightTransferFailed(f"the adapters have ranks {sorted(ranks)}, the server was started for {wanted}")
    [rank] = ranks
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": header.scale * rank,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted(each.removesuffix(".weight") for each in weights),
        "modules_to_save": None,
    }
