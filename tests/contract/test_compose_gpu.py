"""The compose file for GPUs, laid over the one for CPUs: what it builds exists, and each that computes has its GPUs."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla.cli.command_line import build_parser
from flotilla.shared.environment.settings import ENGINE_PYTHONS

ROOT = Path(__file__).parents[2]
GPU: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text(encoding="utf-8"))[
    "services"
]
BASE: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
COMPUTING = ("trainer", "rollout", "reward")


def stages() -> dict[str, str]:
    """Read each stage of the Dockerfile, with its first line."""
    parts = re.split(r"^(?=FROM )", DOCKERFILE, flags=re.MULTILINE)[1:]
    return {part.split("\n")[0].split(" AS ")[1].strip(): part for part in parts}


def test_it_changes_services_that_there_are() -> None:
    assert set(GPU) == {*COMPUTING, "cli"} <= set(BASE)


@pytest.mark.parametrize("name", COMPUTING)
def test_each_that_computes_has_gpus_of_its_own_choice(name: str) -> None:
    [device] = GPU[name]["deploy"]["resources"]["reservations"]["devices"]

    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert re.fullmatch(rf"\$\{{FLOTILLA_{name.upper()}_GPUS:-\d\}}", device["device_ids"][0])
    assert f"FLOTILLA_{name.upper()}_GPUS" in (ROOT / "docs" / "containers.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", COMPUTING)
def test_each_image_is_built_from_a_target_with_torch_for_cuda(name: str) -> None:
    build = BASE[name].get("build", {}) | GPU[name]["build"]

    assert build["target"] in stages()
    assert (ROOT / build["dockerfile"]).is_file()
    assert build["args"]["TORCH_BACKEND"] == "${TORCH_BACKEND:-cu128}"
    parent = build["target"]
    while parent in stages() and parent != "torch":
        parent = stages()[parent].split()[1]
    assert parent == "torch"


def test_an_image_has_one_builder_and_no_name_of_the_cpu_fleet() -> None:
    images = [GPU[name]["image"] for name in COMPUTING]

    assert len(set(images)) == len(images)
    assert not {service["image"] for service in GPU.values()} & {service["image"] for service in BASE.values()}
    assert GPU["cli"]["image"] in images


def test_nothing_more_is_published_mounted_or_allowed() -> None:
    allowed = {"image", "build", "deploy", "shm_size", "pull_policy"}

    assert {key for service in GPU.values() for key in service} <= allowed


def test_the_image_with_sglang_installs_it_by_our_command_where_the_rollout_finds_it() -> None:
    command = re.search(r"flotilla (engine install [^&\n]*)", stages()["sglang"])
    assert command is not None
    arguments = build_parser().parse_args(shlex.split(command[1]))

    assert (arguments.engine, arguments.device) == ("sglang", "cuda")
    assert f"ENV {ENGINE_PYTHONS['sglang']}={arguments.path}/bin/python" in stages()["sglang"]
    assert stages()["sglang"].rstrip().endswith("USER flotilla")
