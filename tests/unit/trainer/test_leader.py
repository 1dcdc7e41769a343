"""What the ranks of a job do when the disk fails one of them in a checkpoint."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flotilla.services.trainer.parallel.channel import Channel
from flotilla.services.trainer.parallel.commands import Command, End, KeepVersion, Save
from flotilla.services.trainer.parallel.ranks import ONE_RANK
from flotilla.services.trainer.worker import follower, leader
from flotilla.shared.errors import FlotillaError, ModelError, Unavailable
from tests.unit.trainer.builders import a_spec


class Learner:
    spec = a_spec()


class Ends:
    """A channel whose followers are all well."""

    def __init__(self, *received: Command, others_failure: str | None = None) -> None:
        self.sent: list[Command] = []
        self.ends: list[str | None] = []
        self._received = list(received)
        self._others_failure = others_failure

    def receive(self) -> Command:
        return self._received.pop(0)

    def send(self, command: Command) -> None:
        self.sent.append(command)

    def end(self, failure: FlotillaError | None = None) -> None:
        self.ends.append(None if failure is None else failure.detail)
        if failure is not None:
            raise failure
        if self._others_failure is not None:
            raise ModelError(self._others_failure)


def failing(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_disk_that_fails_a_follower_is_told_to_the_leader_and_the_follower_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "shared_files", lambda *_: [])
    monkeypatch.setattr(follower, "write_shared", failing)
    channel = Ends(Save(paths={}), KeepVersion(version=1, oldest=0), End())
    obeys = follower.Follower(a_spec(), ONE_RANK, cast(Channel, channel))
    kept: list[int] = []
    obeys._built = cast(Any, SimpleNamespace(keep_version=lambda version, _: kept.append(version)))

    obeys.run()
    obeys._cores.close()

    assert len(channel.ends) == 2 and "No space left on device" in (channel.ends[0] or "")
    assert (channel.ends[1], kept) == (None, [1])


def test_a_checkpoint_that_a_follower_could_not_write_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("reserve", "write_shared"):
        monkeypatch.setattr(leader, name, lambda *_: None)
    monkeypatch.setattr(leader, "shared_files", lambda *_: [])
    channel = Ends(others_failure="rank 1 of 2: No space left on device")

    with pytest.raises(Unavailable, match="rank 1 of 2: No space left on device"):
        leader.Leader(ONE_RANK, cast(Channel, channel)).fill(cast(Any, Learner()), tmp_path)


def test_a_disk_that_fails_the_leader_leaves_no_follower_in_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(leader, "shared_files", lambda *_: [])
    monkeypatch.setattr(leader, "reserve", lambda *_: None)
    monkeypatch.setattr(leader, "write_shared", fail)
    channel = Ends()

    with pytest.raises(OSError, match="Input/output error"):
        leader.Leader(ONE_RANK, cast(Channel, channel)).fill(cast(Any, Learner()), tmp_path)

    assert channel.sent == [Save(paths={})]
    assert len(channel.ends) == 1 and "Input/output error" in (channel.ends[0] or "")
