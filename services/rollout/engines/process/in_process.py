"""The embedded engine on a thread of this process: its own process's, or one of tests that have torch anyway."""

import asyncio
import threading
from concurrent.futures import Future
from contextlib import suppress

from flotilla.services.rollout.engines.embedded.engine import TorchEngine, use_threads
from flotilla.services.rollout.engines.process.commands import Answer, Call, Cancel, Close, Command, Result
from flotilla.services.rollout.engines.process.driver import EngineDriver
from flotilla.services.rollout.engines.process.remote import RemoteEngine
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.shared.errors import FlotillaError, WorkerDied
from flotilla.shared.host.cores import CoreSeat

THREAD = "engine"


class InProcessEngine(RemoteEngine):
    """An ``Engine`` that runs ``TorchEngine`` on its own thread, which loads it too: torch's devices are a thread's.

    Args:
        settings: ``threads`` is ignored without ``cores``: torch's threads belong to the process.
        cores: returns how many threads to compute with.
    """

    def __init__(self, settings: EngineSettings, cores: CoreSeat | None = None) -> None:
        super().__init__(settings.call_seconds)
        self._settings, self._cores = settings, cores
        self._driver: EngineDriver | None = None
        self._thread: threading.Thread | None = None
        self._replies: dict[int, asyncio.Future[Result]] = {}

    async def start(self) -> None:
        """Load the model; see ``Engine.start``."""
        await asyncio.to_thread(self.begin)

    def begin(self) -> None:
        """Load the model; blocks. Errors are those of ``Engine.start``."""
        loaded: Future[EngineDriver] = Future()
        self._thread = threading.Thread(target=self._run, args=(loaded,), name=THREAD, daemon=True)
        self._thread.start()
        self._driver = loaded.result()

    async def close(self) -> None:
        """Abort what is in flight and end the thread; see ``Engine.close``."""
        if self._driver is None or self._thread is None:
            return
        self._driver.post(Close())
        await asyncio.to_thread(self._thread.join, self._settings.close_seconds)
        self._end(WorkerDied("the engine was closed"))

    async def ask(self, call: Call) -> Answer:
        """See ``RemoteEngine.ask``."""
        reply: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._replies[call.call] = reply
        try:
            self.post(call)
            result = await reply
        except asyncio.CancelledError:
            with suppress(WorkerDied):
                self.post(Cancel(call.call))
            raise
        finally:
            del self._replies[call.call]
        if isinstance(result, FlotillaError):
            raise result
        return result

    def post(self, command: Command) -> None:
        """See ``RemoteEngine.post``."""
        if self._driver is None:
            raise WorkerDied("the engine does not run")
        self._driver.post(command)

    def _run(self, loaded: "Future[EngineDriver]") -> None:
        try:
            if self._cores is not None:
                use_threads(self._cores.begin())
            engine = TorchEngine(self._settings)
            if self._cores is not None and self._settings.threads == "auto" and not engine.gains_by_threads:
                self._cores.fix(1)
            driver = EngineDriver(engine, self._reply, self._cores)
        except BaseException as error:
            loaded.set_exception(error)
            return
        loaded.set_result(driver)
        try:
            driver.run()
        except Exception as error:  # Every caller hears of the thread's end, whatever ended it.
            self._end(WorkerDied(f"the engine's thread ended: {error!r}"))
            raise

    def _end(self, error: WorkerDied) -> None:
        self._driver = None
        for number in list(self._replies):
            self._reply(number, error)

    def _reply(self, number: int, result: Result) -> None:
        """Hand a reply to its caller; any thread may."""
        if (reply := self._replies.get(number)) is not None:
            with suppress(RuntimeError):  # its loop is closed
                reply.get_loop().call_soon_threadsafe(_settle, reply, result)


def _settle(reply: "asyncio.Future[Result]", result: Result) -> None:
    if not reply.done():
        reply.set_result(result)
