"""What the leader of a job does when its own part of a command fails."""

from pathlib import Path
from typing import Any, cast

import pytest

from services.trainer.parallel.channel import Channel
from services.trainer.parallel.commands import Command, Save
from services.trainer.parallel.ranks import ONE_RANK
from services.trainer.worker import leader
from shared.errors import FlotillaError
from tests.unit.trainer.builders import a_spec


class Learner:
    spec = a_spec()


class Ends:
    """A channel whose followers are all well."""

    def __init__(self) -> None:
        self.sent: list[Command] = []
        self.ends: list[str | None] = []

    def send(self, command: Command) -> None:
        self.sent.append(command)

    def end(self, failure: FlotillaError | None = None) -> None:
        self.ends.append(None if failure is None else failure.detail)
        if failure is not None:
            raise failure


def test_a_disk_that_fails_the_leader_leaves_no_follower_in_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(leader, "shared_files", lambda _: [])
    monkeypatch.setattr(leader, "reserve", lambda *_: None)
    monkeypatch.setattr(leader, "write_shared", fail)
    channel = Ends()

    with pytest.raises(OSError, match="Input/output error"):
        leader.Leader(ONE_RANK, cast(Channel, channel)).fill(cast(Any, Learner()), tmp_path)

    assert channel.sent == [Save(directory=str(tmp_path))]
    assert len(channel.ends) == 1 and "Input/output error" in (channel.ends[0] or "")
