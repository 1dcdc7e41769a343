"""Processes without an owner, and strangers that hold devices."""

from flotilla.shared.checks.facts import Running, orphans, parse_holdings

PYTHON = ("python", "-P", "-m")
SERVICE = Running(10, 1, (*PYTHON, "flotilla.services.rollout"))
CHILD = Running(11, 10, (*PYTHON, "flotilla.services.rollout.engines.process.child", "SECRET"))
GRANDCHILD = Running(12, 11, ("nvcc",))
LOST = Running(20, 1, CHILD.words)
HOLDINGS = parse_holdings("12, GPU-a, 1024\n20, GPU-a, 2048\n30, GPU-b, 512\n99, GPU-b, [N/A]\nno line\n")


def test_what_a_service_owns_is_no_orphan_and_what_lost_its_owner_is() -> None:
    found = orphans([SERVICE, CHILD, GRANDCHILD, LOST, Running(30, 1, ("/usr/bin/train", "--key=SECRET"))], HOLDINGS)

    assert [(each.pid, each.command, each.devices) for each in found] == [
        (20, "flotilla.services.rollout.engines.process.child", ("GPU-a",)),
        (30, "/usr/bin/train", ("GPU-b",)),
        (99, "", ("GPU-b",)),
    ]
    assert found[0].memory_bytes == 2048 * 1024**2 and "SECRET" not in str(found)


def test_a_command_of_ours_owns_what_it_started() -> None:
    up = Running(5, 1, ("/venv/bin/python", "/venv/bin/flotilla", "up"))

    assert orphans([up, Running(6, 5, CHILD.words), Running(7, 6, ("sh",))], []) == []
