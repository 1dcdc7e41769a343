"""The compose file as a stranger runs it: what is built, restarted, published and mounted, and what it asks for."""

import hashlib
import importlib.util
import re
import shlex
import shutil
import stat
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from flotilla.cli.command_line import build_parser
from flotilla.services.trainer.supervisor.supervisor import STOP_SECONDS as WORKER_STOP_SECONDS
from flotilla.shared.environment.settings import NOTICE_SECONDS
from flotilla.shared.service.app import STOP_SECONDS
from tests.contract.deploy.variables import unread_variables

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
OURS = sorted(set(SERVICES) - {"redis"})
BUILDERS = {"gateway", "trainer"}


def script(name: str) -> ModuleType:
    """Import a script of the image."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docker" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)s", text)
    assert match, text
    return float(match[1])


def test_every_kind_of_service_is_there() -> None:
    assert set(SERVICES) == {"redis", "gateway", "rollout", "trainer", "reward", "sandbox", "cli"}


@pytest.mark.parametrize("name", ["gateway", "rollout", "trainer", "reward", "sandbox"])
def test_a_service_runs_a_module_that_exists_and_none_of_its_working_directory(name: str) -> None:
    command = SERVICES[name]["command"]

    assert command == ["python", "-m", f"flotilla.services.{name}"]
    assert (ROOT / "services" / name / "__main__.py").is_file()


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_an_image_is_built_from_a_target_that_exists(name: str) -> None:
    build = SERVICES[name]["build"]

    assert (ROOT / build["dockerfile"]).is_file()
    assert re.search(rf"^FROM \S+ AS {build['target']}$", DOCKERFILE, re.MULTILINE)
    declared = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    assert set(build.get("args", {})) <= declared


@pytest.mark.parametrize("name", sorted(set(OURS) - BUILDERS))
def test_using_an_image_never_builds_it_so_no_running_service_is_recreated(name: str) -> None:
    service = SERVICES[name]

    assert "build" not in service
    assert service["pull_policy"] == "never"
    assert service["image"] in {SERVICES[builder]["image"] for builder in BUILDERS}


@pytest.mark.parametrize("name", OURS)
def test_every_variable_is_one_that_the_code_reads(name: str) -> None:
    assert unread_variables(SERVICES[name]["environment"]) == []


def test_a_rollout_has_time_to_hand_over_its_work() -> None:
    rollout = SERVICES["rollout"]
    notice = float(rollout["environment"].get("FLOTILLA_NOTICE_SECONDS", NOTICE_SECONDS))

    assert seconds(rollout["stop_grace_period"]) >= notice + STOP_SECONDS


def test_a_trainer_has_time_to_finish_its_step_and_to_leave() -> None:
    assert seconds(SERVICES["trainer"]["stop_grace_period"]) >= WORKER_STOP_SECONDS + 2 * STOP_SECONDS


def test_nothing_is_published_beyond_loopback() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]

    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_nothing_of_the_checkout_is_mounted_whoever_owns_it() -> None:
    for name, service in SERVICES.items():
        for volume in service.get("volumes", []):
            source = re.sub(r"^\$\{\w+:-(\w+)\}", r"\1", volume).split(":")[0]
            assert source in COMPOSE["volumes"], f"{name} mounts {volume}"


def test_untrusted_programs_share_no_volume_with_the_fleet() -> None:
    assert SERVICES["sandbox"]["volumes"] == []


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_container_gains_no_privilege_and_its_log_is_bounded(name: str) -> None:
    service = SERVICES[name]

    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert {"max-size", "max-file"} <= set(service["logging"]["options"])


@pytest.mark.parametrize("name", sorted(set(SERVICES) - {"cli"}))
def test_health_is_given_time_at_the_start_and_told_soon_afterwards(name: str) -> None:
    check = SERVICES[name]["healthcheck"]

    assert seconds(check["start_period"]) >= 30
    assert seconds(check["interval"]) * check["retries"] <= 20
    if name != "redis":
        is_readiness = name != "sandbox"
        assert check["test"] == ["CMD", "/app/docker/health.sh", "/readyz" if is_readiness else "/healthz"]


def test_only_the_sandbox_has_capabilities_and_only_those_that_give_programs_a_uid_of_their_own() -> None:
    added = {name: set(service["cap_add"]) for name, service in SERVICES.items() if "cap_add" in service}

    assert added == {"sandbox": {"CHOWN", "DAC_OVERRIDE", "KILL", "SETGID", "SETUID"}}


def test_a_sandbox_that_cannot_start_is_not_started_for_ever() -> None:
    assert re.fullmatch(r"on-failure:\d+", SERVICES["sandbox"]["restart"])


def test_replicas_are_a_variable_for_all_that_can_be_several() -> None:
    for name in ("rollout", "reward", "sandbox", "trainer"):
        assert re.fullmatch(r"\$\{FLOTILLA_[A-Z]+:-1\}", SERVICES[name]["deploy"]["replicas"])


def test_the_data_plane_survives_a_crash_and_never_evicts() -> None:
    command = " ".join(SERVICES["redis"]["command"])

    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command
    assert "--aclfile /run/secrets/redis-users.acl" in command
    assert "--client-query-buffer-limit 512mb" in command and "--maxmemory-clients 2gb" in command


def test_a_health_check_of_redis_says_its_password_on_no_command_line() -> None:
    [kind, check] = SERVICES["redis"]["healthcheck"]["test"]

    assert kind == "CMD-SHELL"
    assert check.startswith("printf 'AUTH health %s\\nPING\\n' \"$$(cat /run/secrets/redis-health)\" |")


def test_redis_is_on_a_network_of_those_that_use_it_which_the_sandbox_is_not() -> None:
    users = {name for name, service in SERVICES.items() if any("redis-url" in each for each in service["secrets"])}
    on = {
        network: {n for n, service in SERVICES.items() if network in service["networks"]}
        for network in ("fleet", "plane")
    }

    assert set(COMPOSE["networks"]) == {"fleet", "plane"} and COMPOSE["networks"]["plane"] == {"internal": True}
    assert on["plane"] == {"redis", *users} and "sandbox" not in on["plane"]
    assert on["fleet"] == set(OURS)
    assert SERVICES["gateway"]["environment"]["FLOTILLA_HOST"] == "0.0.0.0", "each network has its own address of it"


def test_nothing_but_files_holds_a_secret() -> None:
    assert re.findall(r"\$\{(\w*(?:TOKEN|PASSWORD|SECRET)\w*)", TEXT) == []
    assert "--requirepass" not in TEXT, "it would be in the list of processes, and in what `inspect` shows"
    for name, service in SERVICES.items():
        for key, value in service.get("environment", {}).items():
            if key.endswith("_FILE") and name != "cli":
                assert value.removeprefix("/run/secrets/") in service["secrets"], f"{name} is told of {value}"
    assert {each["file"] for each in COMPOSE["secrets"].values()} == {f"./secrets/{each}" for each in SECRETS}


def test_a_container_is_given_the_secrets_that_it_needs_and_no_others() -> None:
    assert {name: set(service["secrets"]) for name, service in SERVICES.items()} == {
        "redis": {"redis-users.acl", "redis-health"},
        "gateway": {"token", "service-token", "redis-url-gateway"},
        "reward": {"service-token", "redis-url-reward"},
        "rollout": {"service-token", "redis-url-rollout"},
        "trainer": {"service-token", "redis-url-trainer"},
        "sandbox": {"service-token"},
        "cli": {"token"},
    }


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_the_root_of_a_container_is_read_only_and_what_is_temporary_has_its_place(name: str) -> None:
    assert SERVICES[name]["read_only"] is True
    [place] = SERVICES[name]["tmpfs"]
    assert place.startswith("/tmp:")
    assert "exec" in place or name == "redis", "kernels and a sandbox's programs are compiled there"


URLS = tuple(f"redis-url-{kind}" for kind in ("gateway", "reward", "rollout", "trainer"))
SECRETS = (*URLS, "redis-users.acl", "redis-health", "service-token", "token")


def write_secrets(folder: Path) -> dict[str, str]:
    (folder / "docker").mkdir(exist_ok=True)
    for name in ("env.sh", "users.acl"):
        shutil.copy(ROOT / "docker" / name, folder / "docker")
    subprocess.run(["sh", str(folder / "docker" / "env.sh")], check=True, timeout=30)
    return {path.name: path.read_text() for path in (folder / "secrets").iterdir()}


def test_the_script_writes_every_secret_once_into_a_folder_of_its_owner_alone(tmp_path: Path) -> None:
    first = write_secrets(tmp_path)

    assert sorted(first) == sorted({*SECRETS, "redis-url-backup", "redis-url-operator"}), "those are mounted nowhere"
    urls = {name.removeprefix("redis-url-"): value for name, value in first.items() if name.startswith("redis-url-")}
    passwords = {kind: value.split(":")[2].removesuffix("@redis") for kind, value in urls.items()}
    made = [first["token"], first["service-token"], first["redis-health"], *passwords.values()]
    assert all(re.fullmatch(r"[0-9a-f]{64}", value) for value in made)
    assert len(set(made)) == len(made), "each has a password of its own"
    assert all(urls[kind] == f"redis://{kind}:{password}@redis:6379/0" for kind, password in passwords.items())
    for kind, password in (passwords | {"health": first["redis-health"]}).items():
        digest = hashlib.sha256(password.encode()).hexdigest()
        assert f"user {kind} on #{digest} " in first["redis-users.acl"] and password not in first["redis-users.acl"]
    assert write_secrets(tmp_path) == first
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700
    assert {stat.S_IMODE((tmp_path / "secrets" / name).stat().st_mode) for name in SECRETS} == {0o644}, (
        "the users of containers read them, through a mount of each file"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["docker", "secrets"]


def test_the_script_moves_the_secrets_of_an_earlier_release_and_keeps_all_else(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("FLOTILLA_TOKEN=mine\nFLOTILLA_REDIS_PASSWORD=old\nFLOTILLA_PORT=9000\n")

    found = write_secrets(tmp_path)

    assert found["token"] == "mine" and "old" not in "".join(found.values()), "it was every service's"
    assert re.fullmatch(r"[0-9a-f]{64}", found["service-token"])
    assert (tmp_path / ".env").read_text() == "FLOTILLA_PORT=9000\n"
    assert stat.S_IMODE((tmp_path / ".env").stat().st_mode) == 0o600


@pytest.mark.parametrize("file", [".gitignore", ".dockerignore"])
def test_secrets_are_neither_committed_nor_copied_into_an_image(file: str) -> None:
    ignored = [line.strip("/") for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]

    assert {".env", "secrets"} <= set(ignored)


def test_every_copied_path_exists() -> None:
    for line in DOCKERFILE.splitlines():
        if line.startswith("COPY ") and "--from=" not in line:
            *sources, _ = line.split()[1:]
            assert all((ROOT / source).exists() for source in sources), line


def test_our_own_code_is_copied_after_the_dependencies_are_installed() -> None:
    for stage in ("base", "torch"):
        body = DOCKERFILE.split(f" AS {stage}\n")[1].split("\nFROM ")[0]
        copied = [word for line in body.splitlines() if line.startswith("COPY ") for word in line.split()[1:-1]]
        assert "uv pip install" in body
        assert set(copied) <= {"pyproject.toml", "constraints.txt"}


def test_the_build_of_torch_is_the_one_for_cpu_by_default_and_names_no_host() -> None:
    assert re.search(r"^ARG TORCH_BACKEND=cpu$", DOCKERFILE, re.MULTILINE)
    assert SERVICES["trainer"]["build"]["args"]["TORCH_BACKEND"] == "${TORCH_BACKEND:-cpu}"
    assert "://" not in DOCKERFILE


@pytest.mark.parametrize(
    ("addresses", "chosen"),
    [
        (["172.18.0.3"], "172.18.0.3"),
        (["fd00:1::3", "172.18.0.3"], "172.18.0.3"),
        (["172.18.0.3", "fd00:1::3"], "172.18.0.3"),
        (["fe80::1", "fd00:1::3"], "fd00:1::3"),
        (["127.0.1.1", "::1", "10.0.0.4", "10.1.0.4"], "10.0.0.4"),
    ],
)
def test_a_container_has_one_address_on_networks_of_either_kind(addresses: list[str], chosen: str) -> None:
    assert script("address").choose_address(addresses) == chosen


def test_a_container_without_an_address_says_what_to_set() -> None:
    with pytest.raises(ValueError, match="FLOTILLA_HOST"):
        script("address").choose_address(["127.0.0.1", "::1", "fe80::1"])


def test_bases_and_tools_have_versions() -> None:
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.11\.\d+-slim-\w+$", DOCKERFILE, re.MULTILINE)
    assert re.findall(r"^FROM (\S+:\S+)", DOCKERFILE, re.MULTILINE) == [], "a base is an argument"
    assert re.search(r"'uv==\d+\.\d+\.\d+'", DOCKERFILE)
    assert re.fullmatch(r"valkey/valkey:\d+\.\d+\.\d+-alpine", SERVICES["redis"]["image"])


@pytest.mark.parametrize("stage", ["control", "compute"])
def test_an_image_says_what_it_is_and_has_bytecode(stage: str) -> None:
    body = DOCKERFILE.split(f" AS {stage}\n")[1].split("\nFROM ")[0]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

    assert f'org.opencontainers.image.title="flotilla-{stage}"' in body
    assert f'org.opencontainers.image.version="{version}"' in body
    assert "compileall" in body and "UV_COMPILE_BYTECODE=1" in DOCKERFILE
    assert 'ENTRYPOINT ["tini", "--", "python", "/app/docker/entrypoint.py"]' in body
    assert "USER flotilla" in body


def commands_of_the_readme() -> list[str]:
    return re.findall(r"^docker compose .*?(?=\s{2,}#|$)", README, re.MULTILINE)


def test_the_readme_leads_from_the_clone_to_the_checkpoint_in_five_lines() -> None:
    block = next(part for part in README.split("```") if "docker compose" in part)
    lines = [line for line in block.strip().splitlines() if line]

    assert len(lines) == 5
    assert "git clone" in lines[0] and "docker/env.sh" in lines[0]
    assert "up --build" in lines[1] and "cp gateway:/data/experiments" in lines[-1]


@pytest.mark.parametrize("line", [line for line in commands_of_the_readme() if " cli " in line])
def test_the_command_line_knows_what_the_readme_says(line: str) -> None:
    arguments = shlex.split(line.split(" cli ", 1)[1])

    assert build_parser().parse_args(arguments).command == arguments[0]


def has_compose() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=30).returncode == 0


@pytest.mark.skipif(not has_compose(), reason="the docker command has no compose plugin here")
def test_compose_takes_the_file() -> None:
    result = subprocess.run(
        ["docker", "compose", "--file", str(ROOT / "docker-compose.yml"), "--profile", "tools", "config", "--quiet"],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (result.returncode, result.stderr) == (0, "")
