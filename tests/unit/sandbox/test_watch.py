"""What the kernel holds for a program is counted where no control group does it."""

import mmap
import os
import socket
import time
from pathlib import Path

import pytest

from flotilla.services.sandbox.guard import watch
from flotilla.services.sandbox.guard.watch import BUFFER_BYTES, Held, held, read_status


def own() -> Held:
    status = read_status(os.getpid())
    assert status is not None
    return held({os.getpid(): status}, Path.cwd().lstat().st_dev)


def test_a_socket_counts_once_with_all_that_it_can_hold() -> None:
    before = own().kernel_bytes
    first, second = socket.socketpair()
    copy = first.dup()

    with first, second, copy:
        more = own().kernel_bytes - before

    # The lists of descriptors and mappings that the look itself makes may move a little.
    assert abs(more - 2 * BUFFER_BYTES["socket"]) < 64 * watch.MAPPING_BYTES


def test_a_deleted_file_counts_while_it_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    size = 3 << 20
    with path.open("w+b") as file:
        file.truncate(size)
        mapped = mmap.mmap(file.fileno(), size)
    device = path.lstat().st_dev
    status = read_status(os.getpid())
    assert status is not None
    tree = {os.getpid(): status}
    before = held(tree, device).deleted_bytes

    path.unlink()

    with mapped:
        assert held(tree, device).deleted_bytes == before + size
    assert held(tree, device).deleted_bytes == before


def test_a_look_that_waits_for_a_processor_does_not_delay_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now, work = time.monotonic(), 0.001
    monkeypatch.setattr(time, "process_time", lambda: work)
    monkeypatch.setattr(time, "monotonic", lambda: now + 3.0)  # the look began 3 s ago

    soon = watch.next_look(0.0)
    work = 0.5  # there are very many processes
    later = watch.next_look(0.0)

    assert soon - (now + 3.0) == pytest.approx(watch.POLL_SECONDS)
    assert later - (now + 3.0) == pytest.approx(5.0)
