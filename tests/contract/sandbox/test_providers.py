"""Programs, sessions and files are the same on this machine and at every provider, as far as its API is documented.

The providers are fakes of their documented APIs, in which commands really run. None was tried with an account.
"""

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from flotilla.services.sandbox.boxes.opening import open_boxes
from flotilla.services.sandbox.executor import Program
from flotilla.services.sandbox.guard.job import Phase
from tests.contract.sandbox.fakes.boxes import FakeProvider
from tests.contract.sandbox.fakes.docker import FakeDocker, at_socket
from tests.contract.sandbox.fakes.kubernetes import FakeKubernetes
from tests.contract.sandbox.fakes.opened import FAKES, a_service, settings_for

IMAGE = "swebench/task-1:v2"
PYTHON = Phase("run", ("python3", "main.py"), 10.0)
Service = tuple[httpx.AsyncClient, FakeProvider]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=["local", *FAKES])
async def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    """One service for all tests of a provider: to open the one of this machine takes a second."""
    root = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        async with a_service(request.param, root, patch, sessions=16) as (client, _, fake):
            yield client, fake
    assert fake.boxes == {}, "all of it is taken away at the end"


def packed(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


async def run(client: httpx.AsyncClient, code: str, **fields: Any) -> dict[str, Any]:
    reply = await client.post("/run_code", json={"code": code, "language": "python", **fields})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


async def opened(client: httpx.AsyncClient, **fields: Any) -> tuple[str, dict[str, str]]:
    reply = await client.post("/sessions", json=fields)
    assert reply.status_code == 201, reply.text
    view = reply.json()
    return f"/sessions/{view['id']}", {"Session-Token": view["token"]}


async def cell(client: httpx.AsyncClient, session: tuple[str, dict[str, str]], code: str, **fields: Any) -> Any:
    path, token = session
    reply = await client.post(f"{path}/run", json={"code": code, **fields}, headers=token)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_a_program_reads_writes_and_answers(service: Service) -> None:
    client, _ = service
    code = (
        "import sys\n"
        "sys.stderr.write('said')\n"
        "open('out/made', 'wb').write(open('in', 'rb').read())\n"
        "print(input())\n"
        "sys.exit(7)"
    )
    files = {"in": "AP8=", "out/x": ""}

    found = await run(client, code, stdin="given", files=files, fetch_files=["out/made", "none"])

    assert found["status"] == "Failed"
    result = found["run_result"]
    assert (result["status"], result["return_code"]) == ("Finished", 7)
    assert (result["stdout"], result["stderr"]) == ("given\n", "said")
    assert found["files"] == {"out/made": "AP8="}


async def test_a_shell_program_with_quotes_is_run_as_it_is(service: Service) -> None:
    client, _ = service

    found = await run(client, "echo \"it's $((1 + 1))\" '$HOME'", language="bash")

    assert (found["status"], found["run_result"]["stdout"]) == ("Success", "it's 2 $HOME\n")


async def test_a_program_that_takes_too_long_is_ended(service: Service) -> None:
    client, _ = service

    found = await run(client, "print(1, flush=True)\nimport time\ntime.sleep(30)", run_timeout=0.7)

    assert (found["status"], found["message"]) == ("Failed", "time limit exceeded: 0.7 s")
    assert found["run_result"]["status"] == "TimeLimitExceeded"
    assert found["run_result"]["return_code"] is None


async def test_a_signal_is_told_as_such(service: Service) -> None:
    client, _ = service

    found = await run(client, "import os\nos.kill(os.getpid(), 11)")

    assert (found["status"], found["run_result"]["return_code"]) == ("Failed", -11)


async def test_an_output_is_cut_with_a_note(service: Service) -> None:
    client, _ = service

    found = await run(client, "print('x' * (1 << 21))")

    assert found["run_result"]["stdout"].endswith("\n[output cut after 1048576 bytes]\n")
    assert len(found["run_result"]["stdout"]) < 1048576 + 50


async def test_a_session_keeps_what_its_cells_define(service: Service) -> None:
    client, _ = service
    session = await opened(client, files={"given": "MTI="})

    first = await cell(client, session, "x = open('given').read()\nx")
    failed = await cell(client, session, "1 / 0")
    third = await cell(client, session, "print(x * 2); open('made', 'w').write('m'); None", fetch_files=["made"])

    assert (first["status"], first["run_result"]["stdout"]) == ("Success", "'12'\n")
    assert (failed["status"], failed["run_result"]["return_code"], failed["is_alive"]) == ("Failed", 1, True)
    assert failed["run_result"]["stderr"].rstrip().endswith("ZeroDivisionError: division by zero")
    assert (third["run_result"]["stdout"], third["files"]) == ("1212\n", {"made": "bQ=="})


async def test_a_cell_that_takes_too_long_is_interrupted_and_costs_nothing(service: Service) -> None:
    client, _ = service
    session = await opened(client)
    await cell(client, session, "x = 5")

    late = await cell(client, session, "import time\ntime.sleep(30)", run_timeout=0.5)
    after = await cell(client, session, "x")

    assert (late["status"], late["run_result"]["status"], late["is_alive"]) == ("Failed", "TimeLimitExceeded", True)
    assert after["run_result"]["stdout"] == "5\n"


async def test_a_cell_that_ends_the_interpreter_ends_the_session(service: Service) -> None:
    client, _ = service
    session = await opened(client)

    last = await cell(client, session, "import os\nos._exit(9)")
    path, token = session
    reply = await client.post(f"{path}/run", json={"code": "1"}, headers=token)

    assert (last["is_alive"], last["run_result"]["return_code"]) == (False, 9)
    assert "with exit code 9" in last["message"]
    assert reply.status_code == 410


async def test_commands_of_a_session_share_its_files(service: Service) -> None:
    client, _ = service
    session = await opened(client, language="shell", files={"src/a": packed("one\n")})

    first = await cell(client, session, 'echo two >> src/a; echo "it\'s" >&2; exit 3')
    second = await cell(
        client, session, "cat src/a tests/t", files={"tests/t": packed("three\n")}, fetch_files=["src/a"]
    )
    late = await cell(client, session, "sleep 30", run_timeout=0.5)
    left = await cell(client, session, "(sleep 60 &) ; echo begun")

    assert (first["status"], first["run_result"]["return_code"]) == ("Failed", 3)
    assert first["run_result"]["stderr"] == "it's\n"
    assert (second["run_result"]["stdout"], second["files"]) == ("one\ntwo\nthree\n", {"src/a": packed("one\ntwo\n")})
    assert (late["run_result"]["status"], late["is_alive"]) == ("TimeLimitExceeded", True)
    assert left["run_result"]["stdout"] == "begun\n", "what a command leaves behind holds nobody up"


async def test_a_session_outlives_who_opened_it(service: Service) -> None:
    client, _ = service
    session = await opened(client, language="shell", idle_seconds=60)
    await cell(client, session, "echo answer > solution")

    grader = httpx.AsyncClient(transport=client._transport, base_url=client.base_url, headers=client.headers)
    async with grader:
        graded = await cell(grader, session, "sh check", files={"check": packed("grep -c answer solution")})
        closed = await grader.delete(session[0], headers=session[1])

    assert (graded["status"], graded["run_result"]["stdout"]) == ("Success", "1\n")
    assert closed.status_code == 204


async def test_an_image_is_had_from_a_provider_alone_and_where_it_is_allowed(service: Service) -> None:
    client, _ = service
    health = (await client.get("/healthz")).json()

    refused = await client.post("/run_code", json={"code": "1", "language": "python", "image": IMAGE})

    assert refused.status_code == 422
    wanted = "FLOTILLA_SANDBOX_PROVIDER" if health["provider"] == "local" else "FLOTILLA_SANDBOX_IMAGES"
    assert wanted in refused.json()["detail"]
    assert (health["isolation"] is None) == (health["provider"] != "local")


@pytest.mark.parametrize("provider", FAKES)
async def test_each_program_has_a_box_of_its_own_of_the_image_it_names(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_service(provider, tmp_path, monkeypatch, images=["swebench/*"]) as (client, _, fake):
        first = await run(client, "open('x', 'w').write('1')", image=IMAGE)
        made = list(fake.boxes.values())
        second = await run(client, "import os\nprint(os.path.exists('x'))")
        absent = await run(client, "print(1)", image="swebench/none:v0")

    assert first["status"] == "Success"
    assert second["run_result"]["stdout"] == "False\n"
    assert fake.num_made >= 2
    assert all(IMAGE in str(box.wanted) for box in made)
    assert absent["status"] == "SandboxError"
    assert "swebench/none" in absent["message"] or "image" in absent["message"]


@pytest.mark.parametrize("provider", FAKES)
async def test_boxes_are_bounded_closed_and_end_by_themselves(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_service(provider, tmp_path, monkeypatch, warm=1) as (_, state, fake):
        async with asyncio.timeout(10.0):
            while not fake.boxes:
                await asyncio.sleep(0.01)
        (box,) = fake.boxes.values()

    wanted = box.wanted
    if provider == "docker":
        host = wanted["HostConfig"]
        assert isinstance(host, dict)
        assert (host["NetworkMode"], host["AutoRemove"], host["CapDrop"]) == ("none", True, ["ALL"])
        assert host["Memory"] == host["MemorySwap"] == state.settings.limits.memory_bytes
        assert host["SecurityOpt"] == ["no-new-privileges"]
        assert wanted["Entrypoint"] == ["sleep", "6000"]
    elif provider == "e2b":
        assert (wanted["allow_internet_access"], wanted["timeout"], wanted["secure"]) == (False, 6000, True)
    elif provider == "kubernetes":
        spec = wanted["spec"]
        assert isinstance(spec, dict)
        pod = spec["podTemplate"]["spec"]
        (container,) = pod["containers"]
        assert (pod["automountServiceAccountToken"], pod["restartPolicy"]) == (False, "Never")
        assert container["resources"]["limits"] == {"memory": str(512 << 20), "cpu": "2000m"}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert (container["command"], spec["shutdownPolicy"]) == (["sleep", "6000"], "Delete")
        assert isinstance(fake, FakeKubernetes)
        (policy,) = fake.policies
        closed = {"podSelector": {"matchLabels": {"flotilla": "sandbox"}}, "policyTypes": ["Ingress", "Egress"]}
        assert policy["spec"] == closed
    elif provider == "modal":
        assert (wanted["is_closed"], wanted["timeout"], wanted["command"]) == (True, 6000, ["sleep", "6000"])
        assert (wanted["memory"], wanted["cpu"]) == ((512, 512), (2000, 2000))
    else:
        assert (wanted["networkBlockAll"], wanted["ttlMinutes"], wanted["public"]) == (True, 100, False)
        assert (wanted["memory"], wanted["cpu"]) == (1, 2)
    assert set(box.labels) == {"flotilla", "flotilla-owner", "flotilla-box", "flotilla-until"}


async def test_docker_is_asked_over_its_unix_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDocker(tmp_path)
    async with at_socket(fake, tmp_path / "docker.sock") as url:
        settings = settings_for("docker", url=url, images=["swebench/*"])
        async with open_boxes(settings, 1) as opened:
            program = Program({"main.py": packed("print(2)")}, (PYTHON,), (), settings.limits, image=IMAGE)
            found = await opened.runner.run(opened.slots[0], program)

    assert found.phases[0].output() == ("2\n", "")
    assert fake.boxes == {}
    assert "POST /v1.43/images/create" in fake.calls, "an image that is not there is pulled"
