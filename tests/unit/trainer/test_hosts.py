"""Who trains in whose process, in which turns, and who hears what there."""

import asyncio
import contextlib
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn

from flotilla.services.trainer.checkpoint.manager import Progress
from flotilla.services.trainer.hosting import hosts, serving
from flotilla.services.trainer.hosting.hosts import HostedWorker, SharedWorkers, WorkerHost, reason_not_shared
from flotilla.services.trainer.hosting.serving import Answers, Workers
from flotilla.services.trainer.models.shared_bases import SharedBases, around_the_same
from flotilla.services.trainer.parallel.turns import ComputeTurns
from flotilla.services.trainer.supervisor.process import ExitStatus
from flotilla.services.trainer.wire import Failed, FromWorker, Launch, Line, Order, Status
from flotilla.services.trainer.worker.compute import ComputeCores, ComputeThread
from flotilla.services.trainer.worker.control import RunControl
from flotilla.services.trainer.worker.loop import TrainingLoop
from flotilla.shared.checkpoints.lineage import INITIAL, VersionLine
from flotilla.shared.children.processes import READ_BYTES
from flotilla.shared.children.spawning import spawn
from flotilla.shared.config.sections.parallelism import ParallelismConfig
from flotilla.shared.schemas.service import WAITS_FOR_TURN, Failure, WorkState
from flotilla.shared.telemetry.logging import experiment_id
from flotilla.shared.telemetry.recent import RecentLines
from tests.unit.trainer.builders import a_spec
from tests.unit.trainer.test_figures_of_a_checkpoint import Learner, Planner, Publisher, Samples
from tests.unit.trainer.test_supervisor import ADDRESSES, FakeWorker, an_assignment

LORA: dict[str, Any] = {
    "model": {"path": "model", "dtype": "float32", "lora": {"rank": 4}},
    "asynchrony": {"publication": {"lora": "adapters"}},
    "parallelism": {"device": "cpu"},
}


def launch_of(experiment_id: str = "e", /, **sections: Any) -> Launch:
    """Make the launch of an experiment that may share, with keys of its sections changed."""
    merged = {name: LORA.get(name, {}) | sections.get(name, {}) for name in LORA.keys() | sections.keys()}
    spec = a_spec(**merged).model_dump(mode="json")
    assignment = an_assignment(spec=spec, experiment_id=experiment_id)
    return Launch(assignment=assignment, service_id="t", incarnation=1, **vars(ADDRESSES))


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"model": {"lora": None}, "asynchrony": {"publication": {"lora": "auto"}}}, "all weights"),
        ({"asynchrony": {"publication": {"lora": "merged"}}}, "merged"),
        ({"parallelism": {"device": "cpu", "ranks": 2}}, "2 ranks"),
        ({"parallelism": {"device": "cuda:0"}}, "cuda:0"),
        ({"optimisation": {"compile_layers": True, "steps": 3}}, "compile_layers"),
    ],
)
def test_what_trains_in_a_process_of_its_own_says_why(sections: dict[str, Any], why: str) -> None:
    merged = {name: LORA.get(name, {}) | sections.get(name, {}) for name in LORA.keys() | sections.keys()}
    reason = reason_not_shared(a_spec(**merged))

    assert reason is not None
    assert why in reason


class FakeHost:
    """A process that does what the test says."""

    def __init__(self) -> None:
        self.pid, self.is_over, self.num_workers, self.is_wanted = 7, False, 0, True
        self.sent: list[tuple[int, Any]] = []

    def begin(self, launch: Launch, on_message: Callable[[FromWorker], None]) -> HostedWorker:
        """Have it train one more."""
        self.num_workers += 1
        worker = HostedWorker(self, self.num_workers, on_message)  # type: ignore[arg-type]
        worker.tell(launch)
        return worker

    def send(self, number: int, text: str | None) -> None:
        """Note what is said."""
        self.sent.append((number, None if text is None else json.loads(text)["kind"]))

    async def end(self, why: str) -> None:
        """Note that it is ended."""
        self.sent.append((0, "end"))


class Rig:
    """Starts no process."""

    def __init__(self) -> None:
        self.hosts: list[FakeHost] = []
        self.alone: list[FakeWorker] = []
        self.heard: list[FromWorker] = []
        self.workers = SharedWorkers(self.start_alone, self.start_host)  # type: ignore[arg-type]

    async def start_alone(self, launch: Launch, _: ParallelismConfig, hear: Callable[[Any], None]) -> FakeWorker:
        """Start one."""
        self.alone.append(FakeWorker(launch, hear))
        return self.alone[-1]

    async def start_host(self, _: Any) -> FakeHost:
        """Start one."""
        self.hosts.append(FakeHost())
        return self.hosts[-1]

    async def start(self, experiment_id: str = "e", /, **sections: Any) -> Any:
        """Start a worker."""
        launch = launch_of(experiment_id, **sections)
        return await self.workers.start(launch, ParallelismConfig(), self.heard.append)


async def test_those_on_one_base_train_in_one_process_and_others_beside_them() -> None:
    rig = Rig()
    await rig.start()
    await rig.start(model={"path": "model", "dtype": "float32", "lora": {"rank": 16}})
    await rig.start(model={"path": "other", "dtype": "float32", "lora": {"rank": 4}})
    await rig.start(model={"path": "model", "dtype": "float32", "lora": None}, asynchrony={"publication": {}})

    assert [each.num_workers for each in rig.hosts] == [2, 1]
    assert len(rig.alone) == 1
    rig.hosts[0].is_over = True
    await rig.start()
    assert [each.num_workers for each in rig.hosts] == [2, 1, 1]


async def test_a_worker_hears_and_says_what_its_own_supervisor_and_it_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "KILL_SECONDS", 0.01)
    rig = Rig()
    worker = await rig.start()
    rig.hosts[0].is_wanted = False
    worker.tell(Order(state=WorkState.PAUSED))
    worker.hear(Status(state=WorkState.PAUSED, step=3, version=2).model_dump_json())
    worker.hear("no message")

    assert rig.heard == [Status(state=WorkState.PAUSED, step=3, version=2)]
    await worker.stop(0.01)
    assert rig.hosts[0].sent == [(1, "launch"), (1, "order"), (1, None), (0, "end")]
    worker.end(ExitStatus(0, "it ended"))
    await worker.stop(5)
    assert (await worker.ended()).code == 0


def waits(worker: HostedWorker) -> None:
    """Say, as a worker each second, that another one's step keeps it from its last checkpoint."""
    worker.hear(Status(state=WorkState.RUNNING, step=3, version=2, load={WAITS_FOR_TURN: 1.0}).model_dump_json())


@pytest.mark.parametrize(
    ("state", "most", "is_waited_for"),
    [(WorkState.IDLE, 600.0, True), (WorkState.IDLE, 0.05, False), (WorkState.DRAINING, 600.0, False)],
)
async def test_the_time_for_a_last_checkpoint_begins_when_no_other_step_keeps_it_waiting(
    monkeypatch: pytest.MonkeyPatch, state: WorkState, most: float, is_waited_for: bool
) -> None:
    monkeypatch.setattr(hosts, "KILL_SECONDS", 0.01)
    monkeypatch.setattr(hosts, "MOST_WAITED_SECONDS", most)
    rig = Rig()
    worker = await rig.start()
    rig.hosts[0].is_wanted = False
    worker.tell(Order(state=state))
    stopping = asyncio.create_task(worker.stop(0.3))
    for _ in range(6):
        waits(worker)
        await asyncio.sleep(0.1)

    assert ((1, None) not in rig.hosts[0].sent) is is_waited_for
    worker.end(ExitStatus(0, "it ended"))
    await stopping


async def test_one_that_waits_for_its_turn_says_so() -> None:
    turns, cores = ComputeTurns(), ComputeCores(1)
    with contextlib.closing(cores), ComputeThread(cores, turns.seat("one", 1.0)) as thread:
        assert not thread.is_waiting
        with turns.seat("other", 1.0).turn():
            computing = thread.submit(lambda: None)
            async with asyncio.timeout(5):
                while not thread.is_waiting:
                    await asyncio.sleep(0.001)
        computing.result(5)
        assert not thread.is_waiting


class Told:
    """What a supervisor hears, and for which experiment it is logged then."""

    def __init__(self) -> None:
        self.heard: list[str | None] = []

    def __call__(self, _: FromWorker) -> None:
        self.heard.append(experiment_id.get())


async def test_what_a_process_of_several_wrote_is_told_to_none_of_them_and_filed_under_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recent, told = RecentLines(), [Told(), Told()]
    monkeypatch.setattr("flotilla.shared.telemetry.recent.RECENT", recent)
    status = Status(state=WorkState.RUNNING, step=1, version=None).model_dump_json()
    answers = "".join(json.dumps([number, status]) + "\n" for number in (1, 2))
    code = f"import sys; input(); input(); print({answers!r}, end=''); sys.exit('a line of somebody')"
    monkeypatch.setattr(hosts, "python_module", lambda _: [sys.executable, "-c", code])
    experiment_id.set("one")
    host = await WorkerHost.start("auto")
    workers = [host.begin(launch_of(), told[0])]
    experiment_id.set("other")
    workers.append(host.begin(launch_of(), told[1]))

    ends = [await each.ended() for each in workers]

    assert [each.code for each in ends] == [1, 1]
    for each in ends:
        assert "ended with code 1" in each.cause
        assert "somebody" not in each.cause
    assert [(each.message, each.experiment_id) for each in recent.newest(9).items] == [("a line of somebody", None)]
    assert [each.heard for each in told] == [["one"], ["other"]]


async def test_one_alone_in_its_process_hears_what_that_wrote_last(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; input(); sys.exit('a line of its own')"
    monkeypatch.setattr(hosts, "python_module", lambda _: [sys.executable, "-c", code])
    host = await WorkerHost.start("auto")

    assert "a line of its own" in (await host.begin(launch_of(), Told()).ended()).cause


async def test_what_is_computed_for_an_experiment_is_logged_for_it() -> None:
    cores = ComputeCores(1)
    with contextlib.closing(cores), ComputeThread(cores, ComputeTurns().seat("one", 1.0)) as thread:
        for name in ("one", "other"):
            experiment_id.set(name)
            assert await asyncio.get_running_loop().run_in_executor(thread, experiment_id.get) == name


HOST = """
import json, sys
for line in sys.stdin:
    number, said = json.loads(line)
    if said is None and str(number) not in sys.argv[1:]:
        print(json.dumps([number, None, 3]), flush=True)
"""
"""A process whose workers end when they are given up, but for those that hang."""


class Processes(Rig):
    """Starts processes that train nothing.

    Args:
        hanging: numbers of workers that never end.
    """

    def __init__(self, *hanging: int) -> None:
        super().__init__()
        self.started: list[WorkerHost] = []
        command = [sys.executable, "-I", "-c", HOST, *map(str, hanging)]

        async def start_host(_: Any) -> WorkerHost:
            self.started.append(WorkerHost(await spawn(command, max_line_bytes=READ_BYTES)))
            return self.started[-1]

        self.workers = SharedWorkers(self.start_alone, start_host)  # type: ignore[arg-type]


async def ending_of(worker: Any) -> ExitStatus:
    """Wait for a worker's end."""
    async with asyncio.timeout(10):
        ending = await worker.ended()
    assert isinstance(ending, ExitStatus)
    return ending


async def test_those_whose_process_died_with_several_in_it_start_alone_and_others_share() -> None:
    rig = Processes()
    sharers = [await rig.start("one"), await rig.start("other")]
    os.kill(rig.started[0].pid, signal.SIGKILL)
    endings = [await ending_of(each) for each in sharers]
    assert [(each.code, each.is_with_others) for each in endings] == [(-signal.SIGKILL, True)] * 2
    await rig.start("one")
    await rig.start("other")
    assert [each.launch.assignment.experiment_id for each in rig.alone] == ["one", "other"]

    third = await rig.start("third")
    os.kill(rig.started[1].pid, signal.SIGKILL)
    assert not (await ending_of(third)).is_with_others, "nobody else can have been the cause"
    await rig.start("third")
    assert [len(rig.started), len(rig.alone)] == [3, 2]
    await rig.started[2].end("the test is over")


async def test_a_process_ends_with_the_last_of_its_workers() -> None:
    rig = Processes()
    one, other = await rig.start("one"), await rig.start("other")
    await one.kill()
    assert [(await ending_of(one)).code, rig.started[0].is_over] == [3, False]
    await other.kill()
    assert (await ending_of(other)).is_with_others is False
    async with asyncio.timeout(10):
        await rig.started[0]._child.ended()


@pytest.mark.parametrize("num_sharers", [1, 2, 3])
@pytest.mark.parametrize("given_up", [1, 2])
async def test_a_worker_that_does_not_end_is_ended_with_its_process(
    monkeypatch: pytest.MonkeyPatch, num_sharers: int, given_up: int
) -> None:
    monkeypatch.setattr(hosts, "KILL_SECONDS", 0.05)
    monkeypatch.setattr(hosts, "SHARED_KILL_SECONDS", 0.5)
    rig = Processes(1, 2, 3)
    workers = [await rig.start(f"number {at}") for at in range(num_sharers)]
    began = time.monotonic()
    async with asyncio.timeout(10):
        await asyncio.gather(*(each.kill() for each in workers[:given_up]))
    took = time.monotonic() - began

    endings = [await ending_of(each) for each in workers]
    assert all("did not end within" in each.cause for each in endings)
    assert {each.is_with_others for each in endings} == {num_sharers > 1}
    assert (took >= 0.5) is (num_sharers > given_up), "others had their time to train on"
    assert rig.started[0].is_over


async def test_nothing_is_left_of_a_worker_that_ended_and_nobody_starts_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Any] = []

    class Worker:
        def __init__(self, orders: asyncio.StreamReader, *_: Any, **__: Any) -> None:
            started.append(orders)

        async def run(self) -> int:
            await started[-1].read()
            return 0

    monkeypatch.setattr(serving, "WorkerProcess", Worker)
    monkeypatch.setattr(serving, "sweep_images", lambda: None)
    out, lines = io.BytesIO(), asyncio.StreamReader()
    workers = Workers(out)
    lines.feed_data(b'[1, "launch"]\n')
    serves = asyncio.create_task(workers.serve(lines))
    await asyncio.sleep(0.01)
    lines.feed_data(b"[1, null]\n")
    await asyncio.sleep(0.05)
    lines.feed_data(b'[1, "order"]\n[1, null]\n')
    lines.feed_eof()
    await serves

    assert [json.loads(each) for each in out.getvalue().splitlines()] == [[1, None, 0]]
    assert [len(started), len(workers._orders)] == [1, 0]


def test_lines_of_one_worker_keep_apart_from_those_of_others() -> None:
    out = io.BytesIO()
    one, other = Answers(1, out), Answers(2, out)
    lines: list[Line] = [
        Status(state=WorkState.RUNNING, step=1, version=None),
        Failed(failure=Failure(component="trainer", cause="no\nnumber", fatal=True), is_permanent=True),
    ]
    one.write(lines[0].line()[:10])
    other.write(lines[1].line())
    one.write(lines[0].line()[10:])
    one.end(1)

    found = [json.loads(line) for line in out.getvalue().splitlines()]
    texts = [each.line().decode().strip() for each in lines]
    assert found == [[2, texts[1]], [1, texts[0]], [1, None, 1]]


class LastCheckpoint:
    """Notes when a checkpoint is made at the end."""

    is_durable = False

    def __init__(self) -> None:
        self.progress, self.saved = Progress.start(), list[int]()
        self.line = VersionLine.of([INITIAL], steps_per_version=1, total_steps=3)

    async def settled(self) -> None:
        """Write nothing beside the steps."""

    async def at_the_end(self, **_: Any) -> None:
        """Make a checkpoint."""
        self.saved.append(self.progress.step)


class Now:
    """A clock that the computations move."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_time_is_shared_by_weight_and_one_computes_at_a_time() -> None:
    now = Now()
    turns = ComputeTurns(now)
    order: list[str] = []
    seats = {name: turns.seat(name, weight) for name, weight in (("heavy", 2.0), ("light", 1.0))}

    def work(name: str) -> None:
        for _ in range(20):
            with seats[name].turn():
                order.append(name)
                now.seconds += 1.0
                end = time.monotonic() + 5
                # As long as both want to compute.
                while len(order) < 20 and not turns._waiting and time.monotonic() < end:
                    time.sleep(0.001)

    threads = [threading.Thread(target=work, args=(name,)) for name in seats]
    with turns.seat("first", 1.0).turn():
        for each in threads:
            each.start()
        while len(turns._waiting) < 2:
            time.sleep(0.001)
    for each in threads:
        each.join(20)

    assert len(order) == 40
    assert order[:18].count("heavy") == 12


def test_one_that_comes_to_its_end_goes_first() -> None:
    turns, told, order = ComputeTurns(), set[str](), list[str]()
    seats = {name: turns.seat(name, 1.0, partial(told.__contains__, name)) for name in ("a", "b", "ending")}

    def work(name: str) -> None:
        with seats[name].turn():
            order.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in seats]
    with seats["ending"].turn():
        pass  # The others have used nothing yet.
    with turns.seat("first", 1.0).turn():
        for each in threads:
            each.start()
        while len(turns._waiting) < 3:
            time.sleep(0.001)
        told.add("ending")
    for each in threads:
        each.join(20)

    assert order == ["ending", "a", "b"]


def test_one_that_is_given_up_waits_for_nobody() -> None:
    turns, cores = ComputeTurns(), ComputeCores(1)
    seat, other = turns.seat("given up", 1.0), turns.seat("other", 1.0)
    with contextlib.closing(cores), ComputeThread(cores, seat) as thread, other.turn():
        waiting = thread.submit(time.monotonic)
        while not turns._waiting:
            time.sleep(0.001)

        seat.leave()

        with pytest.raises(CancelledError):
            waiting.result(10)
    with other.turn():
        assert turns._waiting == {}


async def test_a_step_that_waits_for_its_turn_is_not_begun_when_the_experiment_ends() -> None:
    turns, cores, control = ComputeTurns(), ComputeCores(1), RunControl(on_state=lambda _: None)
    durability, seat = LastCheckpoint(), turns.seat("ending", 1.0, lambda: control.is_stopped)
    with contextlib.closing(cores), ComputeThread(cores, seat) as compute:
        parts = Learner(), Planner(), Publisher(), durability, None, control, compute, Samples()
        async with asyncio.timeout(20):
            with turns.seat("other", 1.0).turn():
                running = asyncio.create_task(TrainingLoop(*cast(Any, parts)).run())
                while not turns._waiting:
                    await asyncio.sleep(0.001)
                control.stop(is_over=True)
            assert not await running

    assert durability.saved == [0]


def test_an_error_of_one_gives_the_turn_to_the_next() -> None:
    turns = ComputeTurns()
    one, other = turns.seat("one", 1.0), turns.seat("other", 1.0)
    with pytest.raises(ValueError, match="no number"), one.turn():
        raise ValueError("no number")

    with other.turn():
        pass


def test_layers_around_the_same_weights_are_each_ones_own() -> None:
    base = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    base[1].weight = base[0].weight
    bases, loads = SharedBases(), []

    def load() -> Any:
        loads.append(1)
        from flotilla.services.trainer.models.loading import LoadedModel

        return LoadedModel(base, "nowhere")  # type: ignore[arg-type]

    key: Any = ("nowhere", "float32", "auto", "auto")
    one, other = bases.model(key, load).model, bases.model(key, load).model
    assert len(loads) == 1
    one.requires_grad_(False)
    one.register_forward_hook(lambda *_: torch.zeros(1))

    assert all(each.requires_grad for each in other.parameters())
    assert other(torch.ones(4)).shape == (4,)
    assert other[1].weight is other[0].weight  # type: ignore[index]
    pairs = list(zip(one.parameters(), other.parameters(), strict=True))
    assert all(a is not b and a.data_ptr() == b.data_ptr() for a, b in pairs)
    assert around_the_same(base) is not base
