"""The levels of isolation: their command lines, and which of them is tried."""

import pytest

from flotilla.services.sandbox.isolation import Place, bwrap_command, candidates, ways_out
from flotilla.shared.errors import Unavailable
from flotilla.shared.schemas.sandbox import (
    IsolationLevel,
)

PLACE = Place("/usr/bin/python3", "/tmp/code", ("/opt/packages",))


def test_bwrap_opens_no_namespace_and_no_writable_root() -> None:
    command = bwrap_command(PLACE)

    for option in ("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--die-with-parent"):
        assert option in command
    assert "--bind" not in command
    assert "--share-net" not in command
    assert command[command.index("--remount-ro", command.index("--remount-ro") + 1) + 1] == "/"


def test_level_d_is_only_tried_when_allowed() -> None:
    assert candidates(None, allows_unsafe=False) == ["A", "B", "C"]
    assert candidates(None, allows_unsafe=True) == ["A", "B", "C", "D"]
    assert candidates(IsolationLevel.B, allows_unsafe=False) == ["B"]
    with pytest.raises(Unavailable):
        candidates(IsolationLevel.D, allows_unsafe=False)


@pytest.mark.parametrize(
    ("uid", "version", "works", "first"),
    [
        (1000, 5, None, "run it as root"),
        (1000, 0, None, "use a kernel with Landlock"),
        (0, 0, None, "use a kernel with Landlock"),
        (1000, 6, None, "let it make user namespaces"),
        (1000, 5, IsolationLevel.B, "set FLOTILLA_SANDBOX_LEVEL=B"),
    ],
)
def test_a_refusal_names_the_best_way_out_first(
    uid: int, version: int, works: IsolationLevel | None, first: str
) -> None:
    ways = ways_out(uid=uid, landlock_version=version, works=works)

    assert ways[0].startswith(first)
    assert (works is None) == ("FLOTILLA_UNSAFE_SANDBOX=1" in ways[-1])
