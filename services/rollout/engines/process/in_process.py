"""The embedded engine on a thread of this process: for tests, examples and tools that have torch anyway."""

import asyncio
import threading

from flotilla.services.rollout.engines.embedded.engine import TorchEngine
from flotilla.services.rollout.engines.process.commands import Close, Command, Result
from flotilla.services.rollout.engines.process.driver import EngineDriver
from flotilla.services.rollout.engines.process.remote import RemoteEngine
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.shared.errors import FlotillaError, WorkerDied


class InProcessEngine(RemoteEngine):
    """An ``Engine`` that runs ``TorchEngine`` on its own thread.

    Args:
        settings: ``threads`` is ignored: torch's threads belong to the process.
    """

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings.call_seconds)
        self._settings = settings
        self._driver: EngineDriver | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Load the model; see ``Engine.start``."""
        self._loop = asyncio.get_running_loop()
        engine = await asyncio.to_thread(TorchEngine, self._settings)
        self._driver = EngineDriver(engine, self._reply)
        self._thread = threading.Thread(target=self._run, args=(self._driver,), name="engine", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Abort what is in flight and end the thread; see ``Engine.close``."""
        if self._driver is None or self._thread is None:
            return
        self._driver.post(Close())
        await asyncio.to_thread(self._thread.join, self._settings.close_seconds)
        self._driver = None
        self._fail_all(WorkerDied("the engine was closed"))

    def _run(self, driver: EngineDriver) -> None:
        assert self._loop is not None
        try:
            driver.run()
        except Exception as error:  # Every caller hears of the thread's end, whatever ended it.
            self._driver = None
            self._call_soon(self._fail_all, WorkerDied(f"the engine's thread ended: {error!r}"))
            raise

    def _post(self, command: Command) -> None:
        if self._driver is None:
            raise WorkerDied("the engine does not run")
        self._driver.post(command)

    def _reply(self, number: int, result: Result) -> None:
        self._call_soon(self._replied, number, result)

    def _call_soon(self, callback: object, *arguments: int | Result | FlotillaError) -> None:
        assert self._loop is not None and callable(callback)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *arguments)
