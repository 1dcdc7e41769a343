"""Which GPUs a process may compute on, found without torch.

nvidia-smi lists what the machine has; CUDA_VISIBLE_DEVICES and FLOTILLA_DEVICES select those of this process.
"""

import functools
import logging
import os
import re
import shutil
from collections.abc import Mapping, MutableMapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

import psutil

from flotilla.shared.children.spawning import output_of
from flotilla.shared.config.load.spec_text import with_changes
from flotilla.shared.config.rules.devices import DeviceFacts, decide
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.schemas.service import Capabilities, GpuDevice, pool_from

log = logging.getLogger(__name__)

DEVICES = "FLOTILLA_DEVICES"
VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
NONE = "none"
PROGRAM = "nvidia-smi"
QUERY = ("--query-gpu=index,uuid,memory.total,name", "--format=csv,noheader,nounits")
QUERY_SECONDS = 20.0
MEBIBYTE = 1024**2
BOOT = Path("/proc/sys/kernel/random/boot_id")
CUDA_BUILD = re.compile(r"^cuda\b[^=]*=\s*['\"]", re.MULTILINE)
"""In torch's ``version.py``; a build for CPUs has None there."""


def parse_devices(text: str) -> tuple[GpuDevice, ...]:
    """Read what nvidia-smi lists: index, UUID, memory in MiB and name, one device a line; other lines are left out."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",", 3)]
        if len(fields) == 4 and fields[0].isdigit():
            size = int(fields[2]) * MEBIBYTE if fields[2].isdigit() else 0
            found.append(GpuDevice(index=int(fields[0]), uuid=fields[1], name=fields[3], memory_bytes=size))
    return tuple(found)


def machine_devices() -> tuple[GpuDevice, ...]:
    """List the GPUs of this machine; none where there is no nvidia-smi, or where it fails."""
    program = shutil.which(PROGRAM)
    if program is None:
        return ()
    try:
        return parse_devices(output_of([program, *QUERY], seconds=QUERY_SECONDS))
    except OSError as error:
        log.warning("devices are not known, and none is declared", extra={"error": repr(error)})
        return ()


def own_devices(machine: Sequence[GpuDevice], environment: Mapping[str, str]) -> tuple[GpuDevice, ...]:
    """Choose the devices of a process, in the order in which CUDA numbers them for it.

    Args:
        machine: what there is. Where that is not known (empty), FLOTILLA_DEVICES is believed.
        environment: of the process.

    Raises:
        InvalidRequest: FLOTILLA_DEVICES names what is not there, or what CUDA_VISIBLE_DEVICES hides.
    """
    shown = environment.get(VISIBLE)
    visible = tuple(machine) if shown is None else _visible(machine, shown)
    names = _names(environment)
    if names is None:
        return visible
    chosen = []
    for name in names:
        found = next((each for each in machine if _is_called(each, name)), None)
        if found is None and machine:
            there = ", ".join(each.label for each in machine)
            raise InvalidRequest(f"{DEVICES} names {name}, and the devices of this machine are {there}")
        if shown is not None and name not in _split(shown) and found not in visible:
            raise InvalidRequest(f"{DEVICES} names {name}, which {VISIBLE} ({shown or 'none'}) hides: change one")
        chosen.append(found or _believed(name))
    return tuple(chosen)


def limit_devices(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let this process and its children see the devices of FLOTILLA_DEVICES alone, where that is set.

    Raises:
        InvalidRequest: it is no list of devices, or they are not there.
    """
    if _names(environment) is not None:
        environment.update(visible_to([each.label for each in own_devices(machine_devices(), environment)]))


def visible_to(labels: Sequence[str]) -> dict[str, str]:
    """Make the variables that let CUDA see these devices alone, numbered as nvidia-smi numbers them."""
    return {VISIBLE: ",".join(labels), ORDER: "PCI_BUS_ID"}


def given_to(labels: Sequence[str]) -> dict[str, str]:
    """Make the variables of a service that gets these devices."""
    return visible_to(labels) | {DEVICES: ",".join(labels) or NONE}


def torch_uses_cuda() -> bool:
    """Whether the torch that is installed was built for CUDA; it is not imported.

    It is searched for in ``sys.path``: services that keep torch out of their own process have it all the same.
    """
    try:
        spec = PathFinder.find_spec("torch")
        if spec is None or spec.origin is None:
            return False
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except (ImportError, ValueError, OSError):
        return False
    return CUDA_BUILD.search(text) is not None


def host_capabilities(*, transports: tuple[str, ...] = (), shared_memory: str | None = None) -> Capabilities:
    """Describe what this process has to compute with.

    Raises:
        InvalidRequest: FLOTILLA_DEVICES is no list of existing devices.
    """
    devices = own_devices(machine_devices(), os.environ)
    return Capabilities(
        device="cuda" if devices and torch_uses_cuda() else "cpu",
        devices=devices,
        machine=machine_identity(),
        cores=os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        transports=transports,
        shared_memory=shared_memory,
        pool=pool_from(os.environ),
    )


def decided_here(spec: ExperimentSpec) -> ExperimentSpec:
    """Resolve what is still ``auto`` by this process's devices; usually the gateway has decided it before."""
    if "auto" not in {spec.parallelism.device, spec.rollout.engine.device, spec.model.dtype}:
        return spec
    devices = own_devices(machine_devices(), os.environ)
    facts = DeviceFacts(len(devices), uses_cuda=bool(devices) and torch_uses_cuda())
    return with_changes(spec, decide(spec, trainers=[facts] if spec.trains else [], rollouts=[facts]))


@functools.cache
def machine_identity() -> str | None:
    """Name this machine until it is booted again; None where the kernel does not say."""
    try:
        return BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return None


def _names(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    text = environment.get(DEVICES, "").strip()
    if not text:
        return None
    names = () if text.lower() == NONE else _split(text)
    if any(not re.fullmatch(r"[0-9]+|(?:GPU|MIG)-[\w./-]+", name) for name in names) or len(set(names)) < len(names):
        raise InvalidRequest(f"{DEVICES} must be numbers or UUIDs of devices, such as 0,1, or none, got {text!r}")
    return names


def _split(text: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in text.split(",") if each.strip())


def _visible(machine: Sequence[GpuDevice], text: str) -> tuple[GpuDevice, ...]:
    """Read CUDA_VISIBLE_DEVICES as CUDA does: what comes after a name that it does not know is not seen."""
    seen: list[GpuDevice] = []
    for name in _split(text):
        found = next((each for each in machine if _is_called(each, name)), None)
        if found is None and machine and name.startswith("MIG-"):
            found = GpuDevice(uuid=name)
        if found is None:
            break
        seen.append(found)
    return tuple(seen)


def _is_called(device: GpuDevice, name: str) -> bool:
    if name.isdigit():
        return device.index == int(name)
    return device.uuid is not None and device.uuid.startswith(name)


def _believed(name: str) -> GpuDevice:
    return GpuDevice(index=int(name)) if name.isdigit() else GpuDevice(uuid=name)
