"""The parts of ``benchmarks.gpu`` with two members of NCCL on one GPU: ranks of a trainer, and a group of weights.

NCCL refuses two members on one device of one host. It knows hosts by ``NCCL_HOSTID``, so each process gets one of its
own: members then talk over its sockets, as between hosts. What is shown is that the calls are right and end; the speed
is that of sockets on the loopback interface, of kernels that take turns on one device. A program called ``nvidia-smi``
tells of more devices, and each rank computes on the first.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_fleets import FLEET_SECONDS, run_fleet, write_experiment
from benchmarks.gpu_place import Found, Place, Shape, attempted
from benchmarks.gpu_variants import GAP

PAIR_SECONDS = 110.0
"""Of a fleet of two ranks, on a GPU."""
PAIR_STEPS = 3
PAIR_LAYERS = 4
HOOK = """\
import importlib.abc
import importlib.util
import os
import sys

os.environ["NCCL_HOSTID"] = f"member-{os.getpid()}"
JOB = "flotilla.services.trainer.parallel.job"


class OnFirstDevice(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != JOB:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def executed(module):
            execute(module)
            module.device_of = lambda config, place: module.torch.device("cuda:0")

        spec.loader.exec_module = executed
        return spec


if "LOCAL_RANK" in os.environ:
    sys.meta_path.insert(0, OnFirstDevice())
"""
SOCKETS = {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN"}
DEVICES = "devices"
"""What the program of that name prints."""
MEMORY_MIB = 40_000


def part_pairs(place: Place) -> Found:
    """Train with two ranks over NCCL, divided in each way, and publish over a group of NCCL."""
    with tempfile.TemporaryDirectory() as folder, more_devices(place, Path(folder)):
        yield "group of weights", attempted(partial(published, place, Path(folder)))
        for name, division in DIVISIONS.items():
            yield name, attempted(partial(trained, place, Path(folder), name, division))


DIVISIONS: dict[str, dict[str, int]] = {
    "fsdp2": {},
    "tensor parallel": {"tensor_parallel": 2},
    "expert parallel": {"expert_parallel": 2},
    "sequence parallel": {"sequence_parallel": 2},
    "replicas": {"ranks": 4, "replicas": 2},
}


@contextmanager
def more_devices(place: Place, folder: Path) -> Iterator[None]:
    """Let processes that are started meanwhile see several devices, and be members of NCCL on hosts of their own."""
    if not place.is_gpu:
        yield
        return
    before = dict(os.environ)
    (folder / "sitecustomize.py").write_text(HOOK, encoding="utf-8")
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nexec cat '{folder / DEVICES}'\n", encoding="utf-8")
    program.chmod(0o755)
    paths = [str(folder), *filter(None, [before.get("PYTHONPATH")])]
    os.environ |= SOCKETS | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": f"{program.parent}{os.pathsep}{before['PATH']}",
    }
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def declare(folder: Path, count: int) -> None:
    """Say how many devices there are: no more than a trainer takes, so that every service sees all of them."""
    lines = [f"{index}, GPU-pair-{index}, {MEMORY_MIB}, one of {count}\n" for index in range(count)]
    (folder / DEVICES).write_text("".join(lines), encoding="utf-8")


def small(place: Place, shape: Shape) -> Place:
    """Take fewer layers, for what is gathered goes over sockets, and heads that two ranks can divide."""
    few = replace(
        shape,
        layers=min(shape.layers, PAIR_LAYERS),
        heads=max(shape.heads, 4),
        kv_heads=max(shape.kv_heads, 2),
        vocabulary=place.fleet.shape.vocabulary,
    )
    return replace(place, fleet=replace(place.fleet, shape=few))


def trained(place: Place, folder: Path, name: str, division: Mapping[str, int]) -> dict[str, Any]:
    """Run a fleet whose trainer has two ranks, and hold its log-probabilities against the engine's."""
    chosen = small(place, place.experts if "expert_parallel" in division else place.fleet.shape)
    directory = folder / name.replace(" ", "-")
    directory.mkdir()
    spec = write_experiment(chosen, directory)
    spec["optimisation"]["steps"] = PAIR_STEPS
    spec["parallelism"] = {"device": place.device.partition(":")[0], "ranks": 2, **division}
    declare(folder, spec["parallelism"]["ranks"])
    found = run_fleet(chosen, directory, spec, directory.name, PAIR_SECONDS if place.is_gpu else FLEET_SECONDS)
    shutil.rmtree(directory, ignore_errors=True)
    if "failed" not in found:
        gaps = {key: value for key, value in found["last_step"].items() if key.startswith(GAP)}
        assert gaps, found
        found = {**found, "moments": {}, "gaps": gaps}
    return found


def published(place: Place, folder: Path) -> dict[str, Any]:
    """Run a fleet whose weights go over a group of NCCL (on a CPU of gloo) to two rollouts."""
    directory = folder / "group"
    directory.mkdir()
    declare(folder, 2)
    chosen = small(place, place.fleet.shape)
    spec = write_experiment(chosen, directory)
    spec["optimisation"]["steps"] = PAIR_STEPS
    spec["resources"] = {"rollouts": {"min": 2, "max": 2}}
    spec["asynchrony"] |= {"publication": {"transport": "nccl" if place.is_gpu else "gloo"}}
    found = run_fleet(chosen, directory, spec, "group", PAIR_SECONDS if place.is_gpu else FLEET_SECONDS)
    logs = (directory / "runs" / "group" / "fleet" / "logs").glob("*.log")
    told = [line[:300] for path in logs for line in path.read_text(errors="replace").splitlines() if "nccl" in line]
    shutil.rmtree(directory, ignore_errors=True)
    return {**found, "said of nccl": told[:8]}
