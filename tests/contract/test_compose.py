"""The compose file names modules and variables that exist, and publishes nothing beyond loopback."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.service_app import STOP_SECONDS
from shared.settings import NOTICE_SECONDS

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")


def test_every_kind_of_service_is_there() -> None:
    assert set(SERVICES) == {"redis", "gateway", "rollout", "trainer", "reward", "sandbox", "cli"}


@pytest.mark.parametrize("name", ["gateway", "rollout", "trainer", "reward", "sandbox"])
def test_a_service_runs_a_module_that_exists(name: str) -> None:
    command = SERVICES[name]["command"]

    assert command == ["python", "-m", f"services.{name}"]
    assert (ROOT / "services" / name / "__main__.py").is_file()


@pytest.mark.parametrize("name", sorted(set(SERVICES) - {"redis"}))
def test_a_service_is_built_from_a_target_that_exists(name: str) -> None:
    build = SERVICES[name]["build"]

    assert (ROOT / build["dockerfile"]).is_file()
    assert re.search(rf"^FROM \S+ AS {build['target']}$", DOCKERFILE, re.MULTILINE)


@pytest.mark.parametrize("name", sorted(set(SERVICES) - {"redis"}))
def test_every_variable_is_one_that_the_code_reads(name: str) -> None:
    read = "\n".join(
        path.read_text(encoding="utf-8")
        for top in ("shared", "services", "flotilla")
        for path in (ROOT / top).rglob("*.py")
    )

    unknown = [key for key in SERVICES[name]["environment"] if key.startswith("FLOTILLA_") and f'"{key}"' not in read]

    assert unknown == []


def test_a_rollout_has_time_to_hand_over_its_work() -> None:
    rollout = SERVICES["rollout"]
    grace = re.fullmatch(r"(\d+)s", rollout["stop_grace_period"])
    notice = float(rollout["environment"].get("FLOTILLA_NOTICE_SECONDS", NOTICE_SECONDS))

    assert grace
    assert float(grace[1]) >= notice + STOP_SECONDS


def test_nothing_is_published_beyond_loopback() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]

    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_no_secret_has_a_default() -> None:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")

    assert "${FLOTILLA_TOKEN:?" in text
    assert "${FLOTILLA_TOKEN:-" not in text


def test_the_data_plane_survives_a_crash_and_never_evicts() -> None:
    command = " ".join(SERVICES["redis"]["command"])

    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command


def test_every_copied_path_exists() -> None:
    for line in DOCKERFILE.splitlines():
        if line.startswith("COPY "):
            *sources, _ = line.split()[1:]
            assert all((ROOT / source).exists() for source in sources), line
