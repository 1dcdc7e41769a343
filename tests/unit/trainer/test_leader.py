"""What the ranks of a job do when the disk fails one of them in a checkpoint."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

from flotilla.services.trainer.checkpoint.files import paths_in, reserve, shared_files
from flotilla.services.trainer.learning import memory
from flotilla.services.trainer.learning.memory import RELOAD_TRIES
from flotilla.services.trainer.models.offloading import Offloader
from flotilla.services.trainer.parallel.channel import Channel
from flotilla.services.trainer.parallel.commands import Command, End, Offload, Reload, Restore, Save
from flotilla.services.trainer.parallel.ranks import ONE_RANK
from flotilla.services.trainer.worker.follower import Follower
from flotilla.services.trainer.worker.leader import Leader
from flotilla.shared.errors import FlotillaError, ModelError, Unavailable
from tests.fleet import tiny_model
from tests.unit.trainer.test_host_copy import a_learner


class Ends:
    """A channel whose followers are all well, unless ``others_failure`` says otherwise."""

    def __init__(
        self,
        *received: Command,
        others_failure: str | None = None,
        on_send: Callable[[], object] = lambda: None,
    ) -> None:
        self.sent: list[Command] = []
        self.ends: list[str | None] = []
        self._received, self._others_failure, self._on_send = list(received), others_failure, on_send

    def receive(self) -> Command:
        return self._received.pop(0)

    def send(self, command: Command) -> None:
        self.sent.append(command)
        self._on_send()

    def end(self, failure: FlotillaError | None = None) -> None:
        self.ends.append(None if failure is None else failure.detail)
        if failure is not None:
            raise failure
        if self._others_failure is not None:
            raise ModelError(self._others_failure)

    def leader(self) -> Leader:
        return Leader(ONE_RANK, cast(Channel, self))


def test_a_disk_that_fails_a_follower_is_told_to_the_leader_and_the_follower_goes_on(tmp_path: Path) -> None:
    learner = a_learner(steps=0)
    files = shared_files(learner)
    reserve(tmp_path, files, tiny_model(), learner)
    there = {name: str(path) for name, path in paths_in(tmp_path, files).items()}
    gone = {name: f"{path}/gone" for name, path in there.items()}
    channel = Ends(Restore(path=None), Save(paths=gone), Save(paths=there), End())

    Follower(learner.spec, ONE_RANK, cast(Channel, channel)).run()

    restored, failed, saved = channel.ends
    assert (restored, saved) == (None, None)
    assert failed is not None and "could not write its part: [Errno 20] Not a directory" in failed


def test_a_checkpoint_that_a_follower_could_not_write_is_tried_again(tmp_path: Path) -> None:
    channel = Ends(others_failure="rank 1 of 2: No space left on device")

    with pytest.raises(Unavailable, match="rank 1 of 2: No space left on device"):
        channel.leader().fill(a_learner(steps=0), tmp_path)

    assert channel.ends == [None], "its own part was written"


def test_a_disk_that_fails_the_leader_leaves_no_follower_in_the_command(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    channel = Ends(on_send=lambda: shutil.rmtree(directory))

    with pytest.raises(FileNotFoundError):
        channel.leader().fill(a_learner(steps=0), directory)

    assert [type(command) for command in channel.sent] == [Save]
    assert len(channel.ends) == 1 and "the leader could not write its part" in (channel.ends[0] or "")


def test_a_follower_says_what_it_has_before_it_loads_and_once_all_have_released_it(tmp_path: Path) -> None:
    learner = a_learner(steps=0)
    said: list[tuple[bool, int]] = []
    channel = Ends(Restore(path=None), Offload(directory=str(tmp_path)), Reload(), End())

    Follower(
        learner.spec,
        ONE_RANK,
        cast(Channel, channel),
        on_devices=lambda are_held: said.append((are_held, len(channel.ends))),
    ).run()

    # With how many commands all ranks had ended by then.
    assert said == [(True, 0), (False, 2), (True, 2)]


@pytest.mark.parametrize("failures", [2, RELOAD_TRIES])
def test_a_follower_waits_for_room_on_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    learner, tries, reload = a_learner(steps=0), list[Offloader](), Offloader.reload

    def crowded(offloader: Offloader) -> None:
        tries.append(offloader)
        if len(tries) <= failures:
            raise MemoryError if len(tries) == 1 else torch.OutOfMemoryError("no room yet")
        reload(offloader)

    monkeypatch.setattr(Offloader, "reload", crowded)
    monkeypatch.setattr(memory, "RETRY_SECONDS", 0.0)
    channel = Ends(Restore(path=None), Offload(directory=str(tmp_path)), Reload(), End())
    follower = Follower(learner.spec, ONE_RANK, cast(Channel, channel))

    if failures < RELOAD_TRIES:
        follower.run()
    else:
        with pytest.raises(torch.OutOfMemoryError):
            follower.run()
        reload(tries[0])

    assert len(tries) == min(failures + 1, RELOAD_TRIES)
