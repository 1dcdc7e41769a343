"""The client for asynchronous programs."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias
from urllib.parse import quote

from pydantic import BaseModel

from flotilla.client.calls import PAGE
from flotilla.client.fetching import download, local_model
from flotilla.client.fleet import FleetCalls
from flotilla.client.views import Experiment, Experiments, Metrics, Samples, plot_series
from flotilla.connection import allow_code, allow_fork, choose_experiment
from flotilla.shared.errors import DeadlineExceeded, FlotillaError, NotFound
from flotilla.shared.samples.query import SampleOrder
from flotilla.shared.schemas.experiment import (
    CheckpointFiles,
    DiagnosisView,
    Event,
    ExperimentView,
    ListedCheckpoint,
    MetricPoint,
    Page,
    UploadCheck,
)
from flotilla.shared.schemas.sample_kinds import SampleKind
from flotilla.shared.schemas.samples import SamplePage
from flotilla.shared.streams.ledger import Ledger

if TYPE_CHECKING:
    from flotilla.shared.config.spec import ExperimentSpec

SAMPLES_PAGE = 200
POLL_SECONDS = 0.5
SILENCE_SECONDS = 60.0
"""Of the event stream, which sends a comment every 15 s."""

Spec: TypeAlias = "str | Path | Mapping[str, Any] | ExperimentSpec"
Reference = str | ExperimentView
"""An experiment by its id or name, or as it was read."""
Section = Mapping[str, Any]
"""Keys of a section of a spec."""


class Ledgers(NamedTuple):
    """Where every group of an experiment is, by lane."""

    train: Ledger
    evaluation: Ledger

    @classmethod
    def read(cls, document: Mapping[str, object]) -> Self:
        """Read both from JSON; one that is not there is empty."""
        return cls(*(Ledger.model_validate(document.get(lane, {})) for lane in cls._fields))


class AsyncClient(FleetCalls):
    """Calls one gateway; use it as an async context manager, or ``close`` it. Arguments: see :class:`Calls`.

    An experiment is named by its id or name, which is looked up first, or by its view, which is not.
    """

    async def create(
        self, spec: Spec, *, overrides: Mapping[str, object] | None = None, start: bool = False
    ) -> Experiment:
        """Create an experiment.

        Args:
            spec: path of an experiment file, whose ``prepare`` command is run first; or the spec itself, with absolute
                paths.
            overrides: keys such as ``optimisation.steps`` and their values; for a file alone.
            start: start it at once.

        Raises:
            InvalidSpec: it does not validate; ``errors`` has one entry per field.
            ValueError: overrides of a spec that is no file.
        """
        if isinstance(spec, str | Path):
            # Here, since commands that create nothing start with the client.
            from flotilla.launch_file import read_launch_file, run_prepare

            launch = read_launch_file(
                Path(spec), [f"{key}={json.dumps(each)}" for key, each in (overrides or {}).items()]
            )
            await run_prepare(launch, lambda _: None)
            document: Mapping[str, Any] = launch.document
        elif overrides:
            raise ValueError("overrides apply to a file: change the mapping itself")
        else:
            document = spec.model_dump(mode="json") if isinstance(spec, BaseModel) else spec
        allow_code(*self._place, document)
        params = {"start": "true"} if start else {}
        return await self._call(Experiment, "POST", "/v1/experiments", body=document, params=params)

    async def experiments(self) -> Experiments:
        """List all experiments, oldest first."""
        return Experiments(await self._pages(Experiment, "/v1/experiments"))

    async def experiment(self, reference: Reference | None = None, *, is_unique: bool = False) -> Experiment:
        """Find one by id, name or the beginning of an id, or read one again.

        Args:
            reference: None: the only one that has not ended, else the newest.
            is_unique: a name that several have is not enough, as for what cannot be undone.

        Raises:
            NotFound: there is none.
            Conflict: several are meant.
        """
        if isinstance(reference, ExperimentView):
            return await self._call(Experiment, "GET", f"/v1/experiments/{reference.id}")
        return choose_experiment(await self.experiments(), reference, is_unique=is_unique)

    async def start(self, experiment: Reference) -> Experiment:
        """Start a draft."""
        return await self._act(experiment, "start")

    async def pause(self, experiment: Reference) -> Experiment:
        """Issue no more tasks; services finish the work they have in progress."""
        return await self._act(experiment, "pause")

    async def resume(self, experiment: Reference) -> Experiment:
        """Continue after a pause, or from the newest checkpoint after a stop or a failure."""
        return await self._act(experiment, "resume")

    async def extend(self, experiment: Reference, steps: int) -> Experiment:
        """Raise its ``optimisation.steps``; one that has ended continues."""
        return await self._act(experiment, "extend", {"steps": steps})

    async def fork(self, experiment: Reference, changes: Mapping[str, Any] = {}, step: int | None = None) -> Experiment:
        """Start another from a checkpoint of it, with some keys of the spec changed; without a step the newest."""
        allow_code(*self._place, dict(changes))
        if "rollout" in changes:
            allow_fork(*self._place, (await self.experiment(experiment)).spec, changes)
        return await self._act(experiment, "fork", {"step": step, "changes": dict(changes)})

    async def stop(self, experiment: Reference) -> Experiment:
        """End an experiment; what is outstanding is dropped."""
        return await self._act(experiment, "stop")

    async def change(
        self, /, experiment: Reference, resources: Section | None = None, **sections: Section
    ) -> Experiment:
        """Change quotas while it runs, such as ``{"rollouts": {"max": 4}}``, or keys that can change then.

        Args:
            experiment: which.
            resources: quotas.
            sections: keys by their section, as in ``optimisation={"learning_rate": 5e-7}``; see docs/steering.md.

        Raises:
            InvalidSpec: a key cannot change, or its value is not allowed.
        """
        body = sections if resources is None else {"resources": dict(resources), **sections}
        return await self._call(Experiment, "PATCH", await self._path(experiment), body=body)

    async def delete(self, experiment: Reference, *, files: bool = False) -> None:
        """Delete a draft, or one that has ended, with its series; its directory stays, unless ``files``.

        Raises:
            Conflict: it is at work, or another experiment needs its files.
        """
        await self._answer("DELETE", await self._path(experiment), params={"files": "true"} if files else None)

    async def wait(
        self,
        experiment: Reference,
        until: Callable[[Experiment], bool] | None = None,
        *,
        timeout_seconds: float | None = None,
    ) -> Experiment:
        """Wait until an experiment has ended, or until a condition of its view holds.

        Raises:
            DeadlineExceeded: it did not in time.
        """
        path = await self._path(experiment)
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            view = await self._call(Experiment, "GET", path)
            if view.state.is_final if until is None else until(view):
                return view
            if end is not None and time.monotonic() >= end:
                raise DeadlineExceeded(f"{view.id} is {view.state} at step {view.step} after {timeout_seconds:g} s")
            await asyncio.sleep(POLL_SECONDS)

    async def ledger(self, experiment: Reference) -> Ledgers:
        """Read where every group is; each lane is one atomic snapshot."""
        return Ledgers.read(await self._answer("GET", f"{await self._path(experiment)}/ledger"))

    async def metrics(self, experiment: Reference, names: Sequence[str] = ()) -> Metrics:
        """Read what was recorded so far, in the order of writing, of all series if none is named.

        Raises:
            InvalidRequest: no run has a series of such a name; the message lists similar ones.
        """
        params = {"names": ",".join(names)} if names else {}
        return Metrics(await self._pages(MetricPoint, f"{await self._path(experiment)}/metrics", params))

    async def metric_page(
        self, experiment: Reference, names: Sequence[str] = (), *, after: str | None = None
    ) -> Page[MetricPoint]:
        """Read the next values of some series, or of all, in the order of writing.

        Args:
            experiment: id, name or view.
            names: of series.
            after: ``next`` of the page before; None: from the first value on. A page that is not full is the last one
                so far; its ``next``, or where it has none the one before, leads to what comes.
        """
        params = {"names": ",".join(names) or None, "limit": PAGE, "after": after}
        path = f"{await self._path(experiment)}/metrics"
        return await self._call(Page[MetricPoint], "GET", path, params=params)

    async def follow_metrics(
        self, experiment: Reference, names: Sequence[str] = ()
    ) -> AsyncGenerator[MetricPoint, None]:
        """Follow the values of some series, or of all, from the first one on, until the experiment has ended.

        A step that is trained again, after a trainer's crash, is recorded again.

        Raises:
            InvalidRequest: no run has a series of such a name; the message lists similar ones.
        """
        path = await self._path(experiment)
        after: str | None = None
        while True:
            # Asked first: what is written before an end is seen below.
            view = await self._call(Experiment, "GET", path)
            page = await self.metric_page(view, names, after=after)
            for point in page.items:
                yield point
            after = page.next or after
            if not page.items:
                if view.state.is_final:
                    return
                await asyncio.sleep(POLL_SECONDS)

    async def plot(self, experiments: str | Sequence[str], name: str = "reward/mean") -> Any:
        """Draw one series of one experiment or of several, to compare them.

        Returns:
            A ``matplotlib.figure.Figure``: ``savefig`` writes it, a notebook shows it.

        Raises:
            ImportError: matplotlib is not installed.
        """
        series = {}
        for reference in [experiments] if isinstance(experiments, str) else experiments:
            view = await self.experiment(reference)
            label = view.name if view.name not in series else view.id
            series[label] = await self.metrics(view, [name])
        return plot_series(series, ylabel=name)

    async def diagnosis(self, experiment: Reference) -> DiagnosisView:
        """Read what bounds its speed, and what would change that."""
        return await self._call(DiagnosisView, "GET", f"{await self._path(experiment)}/diagnosis")

    async def checkpoints(self, experiment: Reference) -> list[ListedCheckpoint]:
        """List its durable checkpoints by step, with how far their copies at ``checkpoint.upload_to`` are."""
        return await self._pages(ListedCheckpoint, f"{await self._path(experiment)}/checkpoints")

    async def check_copy(self, experiment: Reference, step: int) -> UploadCheck:
        """Compare a checkpoint with its copy at ``checkpoint.upload_to`` now."""
        path = f"{await self._path(experiment)}/checkpoints/{step}/upload"
        return await self._call(UploadCheck, "GET", path)

    async def fetch_model(
        self, experiment: Reference, directory: str | Path | None = None, *, step: int | None = None
    ) -> Path:
        """Give the directory of a checkpoint's model, which ``from_pretrained`` loads.

        On the trainer's machine that is where it is, and nothing is copied. Elsewhere its files are downloaded through
        the gateway; a download that broke off continues, and what came is checked by its checksums.

        Args:
            directory: where to put it; None: the checkpoint itself if it is on this machine, else
                ``EXPERIMENT-step-STEP`` here.
            step: of the checkpoint; None: the newest that is still there.

        Raises:
            NotFound: there is no such checkpoint, or the gateway does not see its files.
            Unavailable: the gateway stayed away; call it again to continue.
        """
        view = experiment if isinstance(experiment, ExperimentView) else await self.experiment(experiment)
        kept = [each for each in await self.checkpoints(view) if step in {None, each.step}]
        if not kept:
            what = "checkpoint" if step is None else f"checkpoint of step {step}"
            raise NotFound(f"{view.id} has no {what} yet")
        chosen = kept[-1]
        if directory is None and (found := local_model(chosen, view.id)) is not None:
            return found
        path = f"/v1/experiments/{view.id}/checkpoints/{chosen.step}/files"
        listed = await self._call(CheckpointFiles, "GET", path)
        target = Path(directory) if directory is not None else Path(f"{view.id}-step-{chosen.step}")

        def open_file(name: str, start: int) -> AsyncGenerator[bytes, None]:
            return self._gateway.chunks(f"{path}/{quote(name)}", start=start, silence_seconds=SILENCE_SECONDS)

        return (await download(list(listed.files), target, open_file)).resolve()

    async def samples(
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
        """Read what the model wrote.

        Args:
            experiment: id or name.
            step: of this step, or evaluated after it.
            kinds: of ``trained``, ``filtered``, ``dropped``, ``failed``, ``evaluation``; all if empty.
            row: of the dataset: the problem.
            group: id of a group.
            failed: of failed groups, or whose grading failed.
            min_reward, max_reward: bounds, both included.
            order: ``newest``, ``best`` or ``worst`` first.
            tokens: with token ids, log-probabilities, advantages and so on.
            limit: most of them.
        """
        query = {
            "step": step,
            "kind": ",".join(SampleKind(kind).value for kind in kinds) or None,
            "row": row,
            "group": group,
            "failed": failed or None,
            "min_reward": min_reward,
            "max_reward": max_reward,
            "order": SampleOrder(order).value,
            "tokens": tokens or None,
        }
        path, found, after = f"{await self._path(experiment)}/samples", Samples(), None
        while len(found) < limit:
            params = {**query, "limit": min(limit - len(found), SAMPLES_PAGE), "after": after}
            page = await self._call(SamplePage, "GET", path, params=params)
            found += page.items
            found.num_unread = page.num_unread
            after = page.next
            if after is None:
                break
        return found

    async def events(self, experiment: Reference, *, after: int = 0) -> AsyncGenerator[Event, None]:
        """Follow what happens, from the first event or the one after ``after``, until the experiment has ended.

        A gateway that is absent is waited for; no event is missed and none comes twice.
        """
        path = f"{await self._path(experiment)}/events"
        while True:
            try:
                headers = {"Last-Event-ID": str(after)} if after else {}
                async with contextlib.aclosing(
                    self._gateway.lines(path, headers=headers, silence_seconds=SILENCE_SECONDS)
                ) as lines:
                    async for line in lines:
                        if line.startswith("data: "):
                            event = Event.model_validate_json(line.removeprefix("data: "))
                            after = event.id
                            yield event
            except FlotillaError as error:
                if not error.retryable:
                    raise
                await asyncio.sleep(POLL_SECONDS)
                continue
            if (await self._call(Experiment, "GET", path.removesuffix("/events"))).state.is_final:
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _path(self, experiment: Reference) -> str:
        view = experiment if isinstance(experiment, ExperimentView) else await self.experiment(experiment)
        return f"/v1/experiments/{view.id}"

    async def _act(self, experiment: Reference, action: str, body: Any = None) -> Experiment:
        return await self._call(Experiment, "POST", f"{await self._path(experiment)}/{action}", body=body)
