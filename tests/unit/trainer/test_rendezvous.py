"""A node of a training job on several hosts: its supervisor, its agent, and what ranks send to another host."""

import mmap
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flotilla.services.trainer.job.__main__ import node_of
from flotilla.services.trainer.job.launcher import interface_of
from flotilla.services.trainer.job.rendezvous import JobEnded, Node, Rendezvous
from flotilla.services.trainer.parallel.remote_parts import receive_parts, send_parts
from flotilla.services.trainer.supervisor.process import command_of
from flotilla.services.trainer.weights.parts import Part, map_file, reserve_file, write_parts
from flotilla.services.trainer.wire import Failed, StoreOpened
from flotilla.services.trainer.worker.follower import check_seen
from flotilla.shared.config.sections.parallelism import ParallelismConfig
from flotilla.shared.errors import ModelError
from flotilla.shared.schemas.service import Assignment, Failure, JobNode, JobReport, WorkState
from flotilla.shared.weights.image.files import HOST_ID, host_identity, shared_memory_identity
from flotilla.shared.weights.image.layout import ImageLayout
from tests.unit.trainer.builders import a_spec
from tests.unit.trainer.test_supervisor import Rig, a_rig, a_status, an_assignment

TWO_NODES = ParallelismConfig(ranks=4, nodes=2)
KILLED = "rank 3 of 4 was ended by SIGKILL"


def a_node(rank: int, epoch: int = 2, port: int | None = None) -> Assignment:
    spec = a_spec(parallelism={"ranks": 4, "nodes": 2}).model_dump(mode="json")
    host = None if port is None else "10.0.0.1"
    return an_assignment(spec=spec, trainer_epoch=epoch, node=JobNode(rank=rank, count=2, host=host, port=port))


async def test_a_node_is_started_once_it_knows_where_the_store_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_rig(monkeypatch) as rig:
        await rig.desire(WorkState.RUNNING, a_node(1).model_copy(update={"node": None}))
        await rig.desire(WorkState.RUNNING, a_node(1))
        await rig.until(lambda: rig.state is WorkState.STARTING)
        assert rig.workers == []

        await rig.desire(WorkState.RUNNING, a_node(1, port=4711))
        await rig.until(lambda: bool(rig.workers))

        assert len(rig.workers) == 1
        assert rig.workers[0].launch.assignment.node == JobNode(rank=1, count=2, host="10.0.0.1", port=4711)


async def test_the_first_node_says_where_its_store_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_rig(monkeypatch) as rig:
        await rig.desire(WorkState.RUNNING, a_node(0))
        await rig.until(lambda: bool(rig.workers))
        assert rig.supervisor.observe().job == JobReport(epoch=2)

        rig.workers[0].say(StoreOpened(port=4711))

        assert rig.supervisor.observe().job == JobReport(epoch=2, host="127.0.0.1", port=4711)


async def test_a_node_that_died_waits_for_the_next_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_rig(monkeypatch) as rig:
        await rig.desire(WorkState.RUNNING, a_node(1, port=1))
        await rig.until(lambda: bool(rig.workers))
        failure = Failure(component="trainer", cause=KILLED, fatal=False)
        rig.workers[0].say(Failed(failure=failure, is_permanent=False))
        rig.workers[0].end(1)
        await rig.until(lambda: rig.supervisor.observe().job == JobReport(epoch=2, ended=KILLED))
        await rig.desire(WorkState.RUNNING, a_node(1, port=1))
        assert len(rig.workers) == 1

        await rig.desire(WorkState.RUNNING, a_node(1, epoch=3, port=2))
        await rig.until(lambda: len(rig.workers) == 2)

        assert rig.supervisor.observe().failure == failure, "it is named until the next job works"
        rig.workers[1].say(a_status())
        assert rig.supervisor.observe().failure is None
        assert rig.supervisor.observe().job == JobReport(epoch=3)


def has_ended(rig: Rig) -> bool:
    job = rig.supervisor.observe().job
    return rig.state is WorkState.FAILED or (job is not None and job.ended is not None)


async def test_a_node_that_dies_in_every_epoch_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_rig(monkeypatch) as rig:
        for epoch in range(2, 6):
            await rig.desire(WorkState.RUNNING, a_node(1, epoch=epoch, port=1))
            await rig.until(lambda epoch=epoch: len(rig.workers) == epoch - 1)
            rig.workers[-1].end(1, KILLED)
            await rig.until(lambda: has_ended(rig))
        await rig.until(lambda: rig.state is WorkState.FAILED)

        failure = rig.supervisor.observe().failure

        assert failure is not None and failure.fatal and KILLED in failure.cause


def test_the_agent_of_a_host_is_told_its_place() -> None:
    first = command_of(TWO_NODES, JobNode(rank=0, count=2), "10.0.0.1")
    second = command_of(TWO_NODES, JobNode(rank=1, count=2, host="10.0.0.1", port=4711), "10.0.0.2")

    assert node_of(first[first.index("flotilla.services.trainer.job") + 1 :]) == Node(2, 0, 2, "10.0.0.1")
    assert node_of(second[second.index("flotilla.services.trainer.job") + 1 :]) == Node(
        2, 1, 2, "10.0.0.2", "10.0.0.1", 4711
    )
    assert node_of(["3"]) == Node(3)


def two_agents() -> tuple[Rendezvous, Rendezvous]:
    ports: list[int] = []
    first = Rendezvous(Node(2, 0, 2), ports.append)
    return first, Rendezvous(Node(2, 1, 2, "127.0.0.1", "127.0.0.1", ports[0]), ports.append)


def test_an_agent_ends_its_ranks_for_the_cause_that_another_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla.services.trainer.job.rendezvous.LOOK_SECONDS", 0.0)
    first, second = two_agents()
    meeting = threading.Thread(target=first.next_rendezvous)
    meeting.start()
    found = second.next_rendezvous()
    meeting.join()
    assert (found.rank, found.world_size, first.num_nodes_waiting()) == (1, 2, 0)

    second.tell(KILLED)
    first.tell("another cause, later")

    with pytest.raises(JobEnded, match=KILLED):
        first.num_nodes_waiting()
    assert first.await_cause() == KILLED


def test_an_agent_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla.services.trainer.job.rendezvous.LOOK_SECONDS", 0.0)
    monkeypatch.setattr("flotilla.services.trainer.job.rendezvous.FAREWELL_SECONDS", 0.1)
    first, second = two_agents()

    assert first.await_cause() == "node 2 of 2 is gone"

    del first
    with pytest.raises(JobEnded, match="node 1 of 2 is gone, and the store of the job with it"):
        second.num_nodes_waiting()


def test_a_node_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla.services.trainer.job.rendezvous.STORE_SECONDS", 0.2)
    first, _ = two_agents()

    with pytest.raises(JobEnded, match=r"node 2 of 2 did not come within 0\.2 s"):
        first.next_rendezvous()


def test_collectives_take_the_interface_of_the_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None


def test_a_name_of_the_host_tells_hosts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOST_ID, raising=False)
    here = host_identity(), shared_memory_identity()

    monkeypatch.setenv(HOST_ID, "second")

    assert host_identity() != here[0] and shared_memory_identity() != here[1]


def test_a_directory_that_is_not_shared_is_refused_with_what_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flotilla.services.trainer.worker.follower.SEEN_SECONDS", 0.01)
    (tmp_path / "seen").write_text("x")

    check_seen(tmp_path / "seen", "x")

    for path, content in ((tmp_path / "seen", "y"), (tmp_path / "elsewhere", "x")):
        with pytest.raises(ModelError, match="on a file system that they share"):
            check_seen(path, content)


class Wire:
    """Ranks of which one sends and the leader receives, in one process."""

    remote, is_leader = frozenset({1}), True

    def __init__(self, round_bytes: int) -> None:
        self.round_bytes = round_bytes
        self._sent: list[torch.Tensor] = []

    def send_to_leader(self, values: torch.Tensor) -> None:
        self._sent.append(values.clone())

    def receive_from(self, rank: int, length: int) -> torch.Tensor:
        values = self._sent.pop(0)
        assert (rank, length) == (1, len(values))
        return values


@pytest.mark.parametrize("round_bytes", [1, 50, 1 << 20])
def test_elements_that_are_sent_are_written_where_a_rank_of_this_host_writes_them(
    tmp_path: Path, round_bytes: int
) -> None:
    layout = ImageLayout.of({"a": ((4, 6), "BF16"), "b": ((5,), "F32"), "step": ((), "F32")})
    every_other = torch.tensor([0, 2, 5])
    parts = [
        Part("a", 0, (4, 6), (slice(1, 3), every_other), torch.randn(2, 3)),
        Part("b", 1, (4,), (slice(0, 0),), torch.empty(0)),
        Part("b", 1, (4,), (slice(2, 4),), torch.randn(2)),
        Part("step", 0, (), (), torch.tensor(7.0)),
    ]
    ranks: Any = Wire(round_bytes)
    own = [replace(part, values=torch.empty(0)) for part in parts]

    def written(name: str, write: Callable[[mmap.mmap], None]) -> bytes:
        reserve_file(tmp_path / name, layout)
        write(map_file(tmp_path / name))
        return (tmp_path / name).read_bytes()

    expected = written("local", lambda mapped: write_parts(mapped, layout, parts))
    send_parts(ranks, layout, parts)
    found = written("sent", lambda mapped: receive_parts(ranks, layout, mapped, own))

    assert found == expected
    send_parts(ranks, layout, parts)
    receive_parts(ranks, layout, None, own)
    assert not ranks._sent, "all is received, even where nothing is written"
