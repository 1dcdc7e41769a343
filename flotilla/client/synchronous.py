"""The client for scripts and notebooks: the asynchronous one, on a thread of its own."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from flotilla.client.asynchronous import CALL_SECONDS, AsyncClient, Ledgers, Spec
from flotilla.client.loop_thread import LoopThread
from flotilla.client.views import Experiment, Experiments, Metrics
from flotilla.connection import DEFAULT_DATA
from flotilla.shared.samples.query import SampleOrder
from flotilla.shared.schemas.experiment import DiagnosisView, Event, MetricPoint
from flotilla.shared.schemas.fleet import FleetView
from flotilla.shared.schemas.sample_kinds import SampleKind
from flotilla.shared.schemas.samples import SampleView
from flotilla.shared.schemas.service import ServiceView
from flotilla.shared.schemas.uploads import ListedCheckpoint

Result = TypeVar("Result")
Params = ParamSpec("Params")


class Client:
    """The same without ``await``, for scripts and notebooks; each method is that of :class:`AsyncClient`.

    The calls run on an event loop of its own thread, so it works inside a running loop, as in a notebook. Use it as a
    context manager, or ``close`` it; the end of the process closes it, too.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        data: str | Path = DEFAULT_DATA,
        deadline_seconds: float = CALL_SECONDS,
    ) -> None:
        async def connected() -> AsyncClient:
            return AsyncClient(url, token, data=data, deadline_seconds=deadline_seconds)

        self._thread = LoopThread()
        try:
            self._client = self._thread.call(connected)
        except BaseException:
            self._thread.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread; a second time nothing is left to do."""
        if self._thread.is_closed:
            return
        try:
            self._thread.call(self._client.close)
        finally:
            self._thread.close()

    def create(self, spec: Spec, *, overrides: Mapping[str, object] | None = None, start: bool = False) -> Experiment:
        """Create an experiment; see :meth:`AsyncClient.create`."""
        return self._run(self._client.create, spec, overrides=overrides, start=start)

    def experiments(self) -> Experiments:
        """List all experiments, oldest first."""
        return self._run(self._client.experiments)

    def experiment(self, reference: str | None = None) -> Experiment:
        """Find one by id or name."""
        return self._run(self._client.experiment, reference)

    def start(self, experiment: str) -> Experiment:
        """Start a draft."""
        return self._run(self._client.start, experiment)

    def pause(self, experiment: str) -> Experiment:
        """Issue no more tasks."""
        return self._run(self._client.pause, experiment)

    def resume(self, experiment: str) -> Experiment:
        """Go on after a pause, or from the newest checkpoint after a stop or a failure."""
        return self._run(self._client.resume, experiment)

    def extend(self, experiment: str, steps: int) -> Experiment:
        """Raise its ``optimisation.steps``; one that has ended goes on."""
        return self._run(self._client.extend, experiment, steps)

    def fork(self, experiment: str, changes: Mapping[str, Any] = {}, step: int | None = None) -> Experiment:
        """Start another from a checkpoint of it, with some keys of the spec changed; without a step the newest."""
        return self._run(self._client.fork, experiment, changes, step)

    def stop(self, experiment: str) -> Experiment:
        """End an experiment."""
        return self._run(self._client.stop, experiment)

    def change(self, experiment: str, resources: Mapping[str, Any]) -> Experiment:
        """Change quotas while it runs."""
        return self._run(self._client.change, experiment, resources)

    def delete(self, experiment: str) -> None:
        """Delete a draft, or one that has ended."""
        self._run(self._client.delete, experiment)

    def wait(
        self,
        experiment: str,
        until: Callable[[Experiment], bool] | None = None,
        *,
        timeout_seconds: float | None = None,
    ) -> Experiment:
        """Wait until an experiment has ended, or until a condition of its view holds."""
        return self._run(self._client.wait, experiment, until, timeout_seconds=timeout_seconds)

    def ledger(self, experiment: str) -> Ledgers:
        """Read where every group is."""
        return self._run(self._client.ledger, experiment)

    def metrics(self, experiment: str, names: Sequence[str] = ()) -> Metrics:
        """Read the values recorded so far."""
        return self._run(self._client.metrics, experiment, names)

    def follow_metrics(self, experiment: str, names: Sequence[str] = ()) -> Iterator[MetricPoint]:
        """Follow the values of some series, or of all, until the experiment has ended."""
        return self._each(self._client.follow_metrics(experiment, names))

    def plot(self, experiments: str | Sequence[str], name: str = "reward/mean") -> Any:
        """Draw one series of one experiment or of several; see :meth:`AsyncClient.plot`."""
        return self._run(self._client.plot, experiments, name)

    def fetch_model(self, experiment: str, directory: str | Path | None = None, *, step: int | None = None) -> Path:
        """Give the directory of a checkpoint's model; see :meth:`AsyncClient.fetch_model`."""
        return self._run(self._client.fetch_model, experiment, directory, step=step)

    def diagnosis(self, experiment: str) -> DiagnosisView:
        """Read what bounds its speed."""
        return self._run(self._client.diagnosis, experiment)

    def checkpoints(self, experiment: str) -> list[ListedCheckpoint]:
        """List its durable checkpoints by step, with how far their copies at ``checkpoint.upload_to`` are."""
        return self._run(self._client.checkpoints, experiment)

    def samples(
        self,
        experiment: str,
        *,
        step: int | None = None,
        kinds: Sequence[SampleKind | str] = (),
        row: int | None = None,
        group: int | None = None,
        failed: bool = False,
        min_reward: float | None = None,
        max_reward: float | None = None,
        order: SampleOrder | str = SampleOrder.NEWEST,
        tokens: bool = False,
        limit: int = 20,
    ) -> list[SampleView]:
        """Read what the model wrote: see ``AsyncClient.samples``."""
        return self._run(
            self._client.samples,
            experiment,
            step=step,
            kinds=kinds,
            row=row,
            group=group,
            failed=failed,
            min_reward=min_reward,
            max_reward=max_reward,
            order=order,
            tokens=tokens,
            limit=limit,
        )

    def services(self) -> list[ServiceView]:
        """List the registered services."""
        return self._run(self._client.services)

    def fleet(self) -> FleetView:
        """Read which experiment has what share of the services."""
        return self._run(self._client.fleet)

    def events(self, experiment: str, *, after: int = 0) -> Iterator[Event]:
        """Follow what happens until the experiment has ended."""
        return self._each(self._client.events(experiment, after=after))

    def _each(self, following: AsyncGenerator[Result, None]) -> Iterator[Result]:
        async def next_one() -> tuple[Result] | None:
            async for found in following:
                return (found,)
            return None

        try:
            while (found := self._run(next_one)) is not None:
                yield found[0]
        finally:
            self._run(following.aclose)

    def _run(
        self, method: Callable[Params, Awaitable[Result]], *arguments: Params.args, **options: Params.kwargs
    ) -> Result:
        async def call() -> Result:
            return await method(*arguments, **options)

        return self._thread.call(call)
