"""Passes the versions to profile to the engine: those of the spec, then those that a user chose while it ran."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flotilla.services.rollout.engines.base import Engine, ProfilesSteps
from flotilla.services.rollout.episodes.base import Episodes
from flotilla.shared.config.sections.tracking import ProfilerConfig
from flotilla.shared.errors import FlotillaError
from flotilla.shared.schemas.task import Task
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.streams.partials import Partials
from flotilla.shared.telemetry.profiles import PROFILES

SECTION = "tracking.profiler."


class ProfiledEpisodes:
    """Episodes whose tasks may carry other versions to be profiled than the spec.

    Args:
        episodes: that answer the tasks.
        engine: theirs.
        directory: of the experiment.
        config: the spec's section.
        service_id: what the gateway calls this service.
    """

    def __init__(
        self,
        episodes: Episodes,
        engine: ProfilesSteps,
        directory: Path,
        config: ProfilerConfig,
        service_id: Callable[[], str],
    ) -> None:
        self._service_id = service_id
        self._episodes, self._engine = episodes, engine
        self._directory, self._config = directory / PROFILES, config
        self._told, self._newest = ProfilerConfig(), -1
        self._follow(config)

    async def run(self, task: Task, partials: Partials = (), serving: int = 0, *, delivery: str = "") -> Group:
        """Answer a task; see ``Episodes.run``."""
        # Tasks of other groups come in any order; what the newest of them carries holds.
        if task.pinned_version is None and task.group_id > self._newest:
            self._newest = task.group_id
            self._follow(with_changes(self._config, task.settings))
        return await self._episodes.run(task, partials, serving, delivery=delivery)

    async def interrupt(self) -> None:
        """End what is under way; see ``Episodes.interrupt``."""
        await self._episodes.interrupt()

    def _follow(self, config: ProfilerConfig) -> None:
        if config == self._told:
            return
        self._told = config
        # An engine that has died reports it to its waiters.
        with suppress(FlotillaError):
            versions = frozenset(config.engine_versions)
            self._engine.profile(self._directory, versions, config.engine_steps, self._service_id())


def with_changes(config: ProfilerConfig, settings: Mapping[str, Any]) -> ProfilerConfig:
    """Read the section with the keys that were changed while the experiment ran, by path."""
    changed = {path.removeprefix(SECTION): value for path, value in settings.items() if path.startswith(SECTION)}
    return ProfilerConfig.model_validate(config.model_dump() | changed) if changed else config


def profiled(
    episodes: Episodes, engine: Engine, directory: Path, config: ProfilerConfig, service_id: Callable[[], str]
) -> Episodes:
    """Let an engine follow what is profiled, where it can."""
    if not isinstance(engine, ProfilesSteps):
        return episodes
    return ProfiledEpisodes(episodes, engine, directory, config, service_id)
