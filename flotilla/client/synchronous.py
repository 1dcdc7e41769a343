"""The client for scripts and notebooks: the asynchronous one, on a thread of its own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flotilla.client.asynchronous import AsyncClient, Ledgers, Reference, Section, Spec
from flotilla.client.fleet import BlockingFleetCalls
from flotilla.client.views import Experiment, Experiments, Metrics, Samples
from flotilla.shared.samples.query import SampleOrder
from flotilla.shared.schemas.experiment import DiagnosisView, Event, ListedCheckpoint, MetricPoint, Page, UploadCheck
from flotilla.shared.schemas.sample_kinds import SampleKind


class Client(BlockingFleetCalls):
    """The same without ``await``, for scripts and notebooks; each method is that of :class:`AsyncClient`.

    The calls run on an event loop of its own thread, so it works inside a running loop, as in a notebook. Use it as a
    context manager, or ``close`` it; the end of the process closes it, too.
    """

    client_class = AsyncClient
    _client: AsyncClient

    def create(self, spec: Spec, *, overrides: Mapping[str, object] | None = None, start: bool = False) -> Experiment:
        """Create an experiment; see :meth:`AsyncClient.create`."""
        return self._run(self._client.create, spec, overrides=overrides, start=start)

    def experiments(self) -> Experiments:
        """List all experiments, oldest first."""
        return self._run(self._client.experiments)

    def experiment(self, reference: Reference | None = None, *, is_unique: bool = False) -> Experiment:
        """Find one by id or name; see :meth:`AsyncClient.experiment`."""
        return self._run(self._client.experiment, reference, is_unique=is_unique)

    def start(self, experiment: Reference) -> Experiment:
        """Start a draft."""
        return self._run(self._client.start, experiment)

    def pause(self, experiment: Reference) -> Experiment:
        """Issue no more tasks."""
        return self._run(self._client.pause, experiment)

    def resume(self, experiment: Reference) -> Experiment:
        """Go on after a pause, or from the newest checkpoint after a stop or a failure."""
        return self._run(self._client.resume, experiment)

    def extend(self, experiment: Reference, steps: int) -> Experiment:
        """Raise its ``optimisation.steps``; one that has ended goes on."""
        return self._run(self._client.extend, experiment, steps)

    def fork(self, experiment: Reference, changes: Mapping[str, Any] = {}, step: int | None = None) -> Experiment:
        """Start another from a checkpoint of it, with some keys of the spec changed; without a step the newest."""
        return self._run(self._client.fork, experiment, changes, step)

    def stop(self, experiment: Reference) -> Experiment:
        """End an experiment."""
        return self._run(self._client.stop, experiment)

    def change(self, experiment: Reference, resources: Section | None = None, **sections: Section) -> Experiment:
        """Change quotas while it runs, or keys that can change then."""
        return self._run(self._client.change, experiment, resources, **sections)

    def delete(self, experiment: Reference, *, files: bool = False) -> None:
        """Delete a draft, or one that has ended; with ``files`` its directory, too."""
        self._run(self._client.delete, experiment, files=files)

    def wait(
        self,
        experiment: Reference,
        until: Callable[[Experiment], bool] | None = None,
        *,
        timeout_seconds: float | None = None,
    ) -> Experiment:
        """Wait until an experiment has ended, or until a condition of its view holds."""
        return self._run(self._client.wait, experiment, until, timeout_seconds=timeout_seconds)

    def ledger(self, experiment: Reference) -> Ledgers:
        """Read where every group is."""
        return self._run(self._client.ledger, experiment)

    def metrics(self, experiment: Reference, names: Sequence[str] = ()) -> Metrics:
        """Read the values recorded so far."""
        return self._run(self._client.metrics, experiment, names)

    def metric_page(
        self, experiment: Reference, names: Sequence[str] = (), *, after: str | None = None
    ) -> Page[MetricPoint]:
        """Read the values recorded after those of an earlier page; see :meth:`AsyncClient.metric_page`."""
        return self._run(self._client.metric_page, experiment, names, after=after)

    def follow_metrics(self, experiment: Reference, names: Sequence[str] = ()) -> Iterator[MetricPoint]:
        """Follow the values of some series, or of all, until the experiment has ended."""
        return self._each(self._client.follow_metrics(experiment, names))

    def plot(self, experiments: str | Sequence[str], name: str = "reward/mean") -> Any:
        """Draw one series of one experiment or of several; see :meth:`AsyncClient.plot`."""
        return self._run(self._client.plot, experiments, name)

    def fetch_model(
        self, experiment: Reference, directory: str | Path | None = None, *, step: int | None = None
    ) -> Path:
        """Give the directory of a checkpoint's model; see :meth:`AsyncClient.fetch_model`."""
        return self._run(self._client.fetch_model, experiment, directory, step=step)

    def diagnosis(self, experiment: Reference) -> DiagnosisView:
        """Read what bounds its speed."""
        return self._run(self._client.diagnosis, experiment)

    def checkpoints(self, experiment: Reference) -> list[ListedCheckpoint]:
        """List its durable checkpoints by step, with how far their copies at ``checkpoint.upload_to`` are."""
        return self._run(self._client.checkpoints, experiment)

    def check_copy(self, experiment: Reference, step: int) -> UploadCheck:
        """Compare a checkpoint with its copy at ``checkpoint.upload_to`` now."""
        return self._run(self._client.check_copy, experiment, step)

    def samples(
        self,
        experiment: Reference,
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
    ) -> Samples:
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

    def events(self, experiment: Reference, *, after: int = 0) -> Iterator[Event]:
        """Follow what happens until the experiment has ended."""
        return self._each(self._client.events(experiment, after=after))
