"""What the sampler's engine samples from: the base or a model's own weights, and adapters of the base side by side.

Where the engine takes adapters, samples of many models are in one batch, and a model that was not sampled from lately
costs what reading its adapter costs. Else, and for models that train whole, the engine's weights change with the
request.
"""

import asyncio
import logging
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flotilla.services.rollout.engines.base import AddsAdapters, Engine
from flotilla.services.rollout.tinker.images import adapter_scale, read_manifest, write_image
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import InvalidRequest, ModelError, NotFound, Unavailable, WeightTransferFailed
from flotilla.shared.models.hub import ADAPTER
from flotilla.shared.tinker.paths import Kind, SavedPath
from flotilla.shared.tinker.records import Sampled, Saved

log = logging.getLogger(__name__)

SERVED_KEPT = 4096
MOST_ADAPTERS = 128
"""In the engine; more than requests that are sampled at a time, so that at least one of them is not in use."""
MOST_ADAPTER_BYTES = 10**9
BASE = "base"


@dataclass(frozen=True, slots=True)
class Source:
    """What a request samples from.

    Attributes:
        path: of saved weights; None: the base's.
        inflight_of: the model whose newest weights in flight those are.
    """

    path: str | None = None
    inflight_of: str | None = None


@dataclass(frozen=True, slots=True)
class Serving:
    """What samples a request: an adapter in the engine, or none, and the number of the weights."""

    adapter: str | None
    version: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """What is in the engine: from where, which of those that lay there one after another, its number and its size."""

    source: Source
    identity: tuple[float, int, int]
    version: int
    num_bytes: int = 0


def _identity(saved: Saved | None) -> tuple[float, int, int]:
    return (0.0, 0, 0) if saved is None else (saved.created, saved.seq, saved.step)


class ServedWeights:
    """Loads into the engine what is asked for, and knows which weights each number means.

    Args:
        engine: started, with the base's weights.
        base: directory of the base.
        data: the fleet's directory.
        drained: waits until nothing is sampled.
    """

    def __init__(self, engine: Engine, base: Path, data: Path, drained: Callable[[], Awaitable[None]]) -> None:
        self._engine, self._base, self._data, self._drained = engine, base, data, drained
        self._takes_adapters = False
        self._whole = Loaded(Source(), _identity(None), 0)
        self._adapters: OrderedDict[str, Loaded] = OrderedDict()
        """By their names in the engine, the one unused longest first."""
        self._uses: Counter[str] = Counter()
        self._version = 0
        # The engine samples from the last ones alone, or from those before until what it has begun is done.
        self._served: dict[int, Sampled] = {0: Sampled(first_token=0)}

    async def begin(self) -> None:
        """Ask the engine what it can.

        Raises:
            WorkerDied: it has ended.
        """
        self._takes_adapters = isinstance(self._engine, AddsAdapters) and (await self._engine.load()).takes_adapters

    def uses(self, serving: Serving) -> None:
        """Note that a request is sampled from it, until ``ends``."""
        if serving.adapter is not None:
            self._uses[serving.adapter] += 1

    def ends(self, serving: Serving) -> None:
        """Note that one that ``uses`` counted is done."""
        if serving.adapter is not None:
            self._uses[serving.adapter] -= 1

    def runs(self, versions: Sequence[tuple[int, int]]) -> list[Sampled]:
        """Return which weights runs of tokens were sampled from."""
        return [self._served[version].model_copy(update={"first_token": first}) for first, version in versions]

    async def serve(self, source: Source) -> Serving:
        """Have the engine sample from these weights.

        Raises:
            InvalidRequest: they are not to be sampled from.
            NotFound: they are not there, or not any more.
            ModelError: they cannot be read.
            Unavailable: there is no room for them.
        """
        if source.path is None:
            return await self._serve_whole(Source(), None, None)
        path = SavedPath.read(source.path)
        if path.kind is Kind.TRAINING:
            raise InvalidRequest(f"{source.path} is to be trained from, not to be sampled from")
        directory = path.below(self._data)
        saved = await asyncio.to_thread(read_manifest, directory)
        if self._takes_adapters and saved.lora is not None:
            await self._serve_whole(Source(), None, None)
            return await self._serve_adapter(source, directory, saved)
        return await self._serve_whole(source, directory, saved)

    async def _serve_whole(self, source: Source, directory: Path | None, saved: Saved | None) -> Serving:
        """Change the weights; what samples from others ends first, unless it is in flight."""
        if (source, _identity(saved)) == (self._whole.source, self._whole.identity):
            return Serving(None, self._whole.version)
        is_newer = source.inflight_of is not None and source.inflight_of == self._whole.source.inflight_of
        with _folder() as folder:
            image = folder / "image.safetensors"
            step = await asyncio.to_thread(write_image, self._base, directory, image)
            if not is_newer:
                # The engine may not have begun with all of them, and would sample those from the new weights.
                await self._drained()
            mode = OnWeightUpdate.CONTINUE if is_newer else OnWeightUpdate.DRAIN
            version = self._next(source, step)
            await self._engine.load_weights(image, version, mode)
        # They were of the weights before.
        self._adapters.clear()
        self._whole = Loaded(source, _identity(saved), version)
        _tell(self._whole)
        return Serving(None, version)

    async def _serve_adapter(self, source: Source, directory: Path, saved: Saved) -> Serving:
        """Let the engine sample with an adapter beside others; one in flight replaces the model's older one."""
        for name, loaded in self._adapters.items():
            if (loaded.source, loaded.identity) == (source, _identity(saved)):
                self._adapters.move_to_end(name)
                return Serving(name, loaded.version)
        version = self._next(source, saved.step)
        # What is saved under a name may be replaced while the one before is sampled from, which stays what it is.
        is_inflight = source.inflight_of is not None
        name = f"inflight {source.inflight_of}" if is_inflight else f"{source.path} {version}"
        await self._load_adapter(name, directory, saved, version)
        self._adapters[name] = Loaded(source, _identity(saved), version, saved.num_bytes)
        self._adapters.move_to_end(name)
        _tell(self._adapters[name])
        await self._make_room(name)
        return Serving(name, version)

    async def _load_adapter(self, name: str, directory: Path, saved: Saved, version: int) -> None:
        assert isinstance(self._engine, AddsAdapters)
        try:
            scale = await asyncio.to_thread(adapter_scale, directory)
            await self._engine.load_adapter(name, directory / ADAPTER, scale, version)
        except (ModelError, WeightTransferFailed) as error:
            await self._check_unchanged(directory, saved)
            raise ModelError(f"the saved model cannot be read: {error.detail}") from error
        try:
            await self._check_unchanged(directory, saved)
        except NotFound:
            if name not in self._adapters:
                await self._engine.drop_adapter(name)
            raise

    async def _check_unchanged(self, directory: Path, saved: Saved) -> None:
        if _identity(await asyncio.to_thread(read_manifest, directory)) != _identity(saved):
            raise NotFound(f"{directory.name}: the saved model was replaced meanwhile")

    async def _make_room(self, newest: str) -> None:
        """Drop unused adapters, least recently used first."""
        assert isinstance(self._engine, AddsAdapters)
        total = sum(each.num_bytes for each in self._adapters.values())
        for name, loaded in list(self._adapters.items()):
            if len(self._adapters) <= MOST_ADAPTERS and total <= MOST_ADAPTER_BYTES:
                return
            if name != newest and not self._uses[name]:
                await self._engine.drop_adapter(name)
                del self._adapters[name], self._uses[name]
                total -= loaded.num_bytes

    def _next(self, source: Source, step: int) -> int:
        self._version += 1
        self._served[self._version] = Sampled(first_token=0, path=source.path, step=step)
        kept = {self._whole.version, *(each.version for each in self._adapters.values())}
        for version in [each for each in sorted(self._served)[:-SERVED_KEPT] if each not in kept]:
            del self._served[version]
        return self._version


def _tell(loaded: Loaded) -> None:
    log.info("sampler serves", extra={"path": loaded.source.path or BASE, "version": loaded.version})


@contextmanager
def _folder() -> Iterator[Path]:
    """Make a folder for an image.

    Raises:
        Unavailable: it cannot be made, such as on a full disk.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="flotilla-tinker-")
    except OSError as error:
        raise Unavailable(f"there is no folder for the weights that are sampled from: {error}") from error
    with folder as name:
        yield Path(name)
