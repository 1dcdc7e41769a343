"""Which GPUs a process declares: from what nvidia-smi lists and two variables."""

import sys
from pathlib import Path

import pytest

from flotilla.cli.commands.status import devices_of
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.schemas.service import Capabilities, GpuDevice
from flotilla.shared.service import devices
from flotilla.shared.service.devices import (
    given_to,
    host_capabilities,
    limit_devices,
    machine_devices,
    own_devices,
    parse_devices,
)

LISTED = """\
0, GPU-aaaa-1, 81559, NVIDIA H100 80GB HBM3
1, GPU-bbbb-2, 81559, NVIDIA H100 80GB HBM3
2, GPU-cccc-3, [N/A], NVIDIA, with a comma
No devices were found
"""
MACHINE = parse_devices(LISTED)


def labels(environment: dict[str, str], machine: tuple[GpuDevice, ...] = MACHINE) -> list[str]:
    return [each.label for each in own_devices(machine, environment)]


def test_what_nvidia_smi_lists_is_read() -> None:
    assert [(each.index, each.uuid, each.memory_bytes >> 20) for each in MACHINE] == [
        (0, "GPU-aaaa-1", 81559),
        (1, "GPU-bbbb-2", 81559),
        (2, "GPU-cccc-3", 0),
    ]
    assert MACHINE[2].name == "NVIDIA, with a comma"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ["0", "1", "2"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, ["2", "0"]),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, ["1"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-bbbb,7,0"}, ["1"]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-a/1/0"}, ["MIG-a/1/0"]),
        ({"FLOTILLA_DEVICES": "none"}, []),
        ({"FLOTILLA_DEVICES": "1, 2"}, ["1", "2"]),
        ({"FLOTILLA_DEVICES": "GPU-cccc-3"}, ["2"]),
        ({"FLOTILLA_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0,1"}, ["1"]),
        (given_to(["2", "0"]), ["2", "0"]),
        (given_to([]), []),
    ],
)
def test_a_process_has_the_devices_that_both_variables_leave_it(
    environment: dict[str, str], expected: list[str]
) -> None:
    assert labels(environment) == expected


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"FLOTILLA_DEVICES": "3"}, "names 3, and the devices of this machine are 0, 1, 2"),
        ({"FLOTILLA_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}, r"names 1, which CUDA_VISIBLE_DEVICES \(0\) hides"),
        ({"FLOTILLA_DEVICES": "cuda:0"}, "numbers or UUIDs of devices, such as 0,1, or none, got 'cuda:0'"),
        ({"FLOTILLA_DEVICES": "0,0"}, "numbers or UUIDs"),
    ],
)
def test_what_is_not_there_is_refused(environment: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        labels(environment)


def test_where_nothing_can_be_asked_the_fleet_s_own_variable_is_believed_and_cuda_s_is_not() -> None:
    assert labels({"FLOTILLA_DEVICES": "0,1"}, ()) == ["0", "1"]
    assert labels(given_to(["4"]), ()) == ["4"]
    assert labels({"CUDA_VISIBLE_DEVICES": "0"}, ()) == []


def test_children_see_the_devices_of_their_service_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "machine_devices", lambda: MACHINE)
    environment = {"FLOTILLA_DEVICES": "GPU-bbbb-2,0"}

    limit_devices(environment)

    assert (environment["CUDA_VISIBLE_DEVICES"], environment["CUDA_DEVICE_ORDER"]) == ("1,0", "PCI_BUS_ID")
    untouched = {"CUDA_VISIBLE_DEVICES": "1"}
    limit_devices(untouched)
    assert untouched == {"CUDA_VISIBLE_DEVICES": "1"}


def test_the_program_is_asked_and_a_failure_of_it_declares_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTED}END\n", encoding="utf-8")
    program.chmod(0o700)
    assert machine_devices() == MACHINE
    program.write_text("#!/bin/sh\necho 0, GPU-x, 1, y\nexit 9\n", encoding="utf-8")
    assert machine_devices() == ()


@pytest.mark.parametrize(("build", "expected"), [(True, "cuda"), (False, "cpu")])
def test_a_service_computes_on_its_devices_where_its_torch_can(
    build: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "machine_devices", lambda: ())
    monkeypatch.setattr(devices, "torch_uses_cuda", lambda: build)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("FLOTILLA_DEVICES", "0,1")

    found = host_capabilities()

    assert (found.device, [each.index for each in found.devices]) == (expected, [0, 1])
    assert found.device_ids("here") == {f"{found.machine}/0", f"{found.machine}/1"}
    monkeypatch.setenv("FLOTILLA_DEVICES", "none")
    assert host_capabilities().device == "cpu"


@pytest.mark.parametrize(
    ("written", "expected"),
    [("cuda: Optional[str] = None\n", False), ("cuda: Optional[str] = '12.8'\n", True), ("cuda = '11.8'\n", True)],
)
def test_a_build_of_torch_says_without_being_imported_whether_it_uses_cuda(written: str, expected: bool) -> None:
    assert bool(devices.CUDA_BUILD.search(f"__version__ = '2'\ndebug = False\n{written}hip = None\n")) is expected


def test_a_service_that_keeps_torch_out_of_its_process_knows_what_torch_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('it is not to be imported')\n", encoding="utf-8")
    (package / "version.py").write_text("cuda: str | None = '13.0'\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "torch", None)

    assert devices.torch_uses_cuda()


def test_devices_fit_into_a_cell() -> None:
    assert devices_of(Capabilities()) == "cpu"
    assert devices_of(Capabilities(device="cuda", devices=MACHINE[:2])) == "cuda 0,1 (2 x 80 GB)"
    assert devices_of(Capabilities(devices=MACHINE[2:])) == "cuda 2 (torch without CUDA)"
    assert devices_of(Capabilities(devices=MACHINE[:1])) == "cuda 0 (1 x 80 GB, torch without CUDA)"
