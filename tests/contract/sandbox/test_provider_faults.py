"""What goes wrong at a provider is never a program's: it is told, counted and bounded, and leaves no box behind."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from flotilla.services.reward.verifiers.code import CodeVerifier
from flotilla.services.sandbox.boxes import keeper
from flotilla.services.sandbox.boxes.executor import BoxExecutor
from flotilla.services.sandbox.providers import e2b, wire
from flotilla.services.sandbox.providers.base import BOX, MARK, MARKED, OWNER, UNTIL, ProviderFailed, owner_here
from flotilla.services.sandbox.state import SandboxState
from flotilla.shared.config.sections.reward import CodeConfig
from flotilla.shared.schemas.grade_status import GradeStatus
from flotilla.shared.schemas.grading import GradingSample
from tests.contract.sandbox.fakes.boxes import FakeBox, FakeProvider, Fault
from tests.contract.sandbox.fakes.opened import FAKES, TOKEN, a_service
from tests.contract.sandbox.test_providers import cell, opened, run

CREATE = r"POST (/v1.43/containers/create|/sandboxes|/api/sandbox|.*/namespaces/default/sandboxes|/SandboxCreateV2)$"
DELETE = r"DELETE |POST /SandboxTerminateV2$"
LIST = r"GET (/v1.43/containers/json|/v2/sandboxes|/api/sandbox|.*/namespaces/default/sandboxes)$|POST /SandboxListV2$"
at_each = pytest.mark.parametrize("provider", FAKES)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "DEADLINE_SECONDS", 1.5)
    monkeypatch.setattr(wire, "CALL_SECONDS", 1.0)
    monkeypatch.setattr(e2b, "CREATE_SECONDS", 1.0)
    if "modal" in FAKES:
        from flotilla.services.sandbox.providers import modal

        monkeypatch.setattr(modal, "CALL_SECONDS", 1.5)
        monkeypatch.setattr(modal, "CREATE_SECONDS", 1.0)
    monkeypatch.setattr(keeper, "SOON_SECONDS", 0.05)
    monkeypatch.setattr(keeper, "CLOSE_SECONDS", 2.0)


def boxes_of(state: SandboxState) -> keeper.Boxes:
    assert isinstance(state.runner, BoxExecutor)
    return state.runner.boxes


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not is_so():
            await asyncio.sleep(0.01)


@at_each
async def test_a_server_that_fails_for_a_moment_costs_nothing(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_service(provider, tmp_path, monkeypatch) as (client, _, fake):
        fake.faults.append(Fault(CREATE, status=500))
        found = await run(client, "print(1)")

    assert found["status"] == "Success"


@at_each
async def test_a_provider_that_asks_for_a_pause_gets_it(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_service(provider, tmp_path, monkeypatch) as (client, _, fake):
        fake.faults.append(Fault(CREATE, status=429, headers={"Retry-After": "1"}))
        began = time.monotonic()
        found = await run(client, "print(1)")

    assert found["status"] == "Success"
    assert time.monotonic() - began >= 1.0


@at_each
async def test_a_provider_that_is_down_is_an_error_of_the_sandbox_and_counted(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_service(provider, tmp_path, monkeypatch) as (client, _, fake):
        fake.faults.append(Fault(CREATE, status=500, body="out of order", times=100))
        found = await run(client, "print(1)")
        session = await client.post("/sessions", json={})
        metrics = (await client.get("/metrics")).text

    assert (found["status"], found["run_result"]) == ("SandboxError", None)
    answered = "InternalError" if provider == "modal" else "500"
    assert f"{provider} answered {answered}: out of order" in found["message"]
    assert (session.status_code, session.json()["code"]) == (503, "unavailable")
    assert f'flotilla_sandbox_provider_failures_total{{cause="failed",provider="{provider}"}} 2.0' in metrics
    assert 'flotilla_sandbox_runs_total{language="python",status="SandboxError"} 1.0' in metrics


@at_each
async def test_a_provider_that_hangs_holds_nobody_up(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_service(provider, tmp_path, monkeypatch, box_start_seconds=0.4) as (client, state, fake):
        fake.faults.append(Fault(CREATE, hangs=True))
        began = time.monotonic()
        found = await run(client, "print(1)")
        took = time.monotonic() - began
        await until(lambda: fake.num_made == 1 and not fake.boxes)  # it came late, and nobody's

    assert found["status"] == "SandboxError"
    assert "within 0.4 s" in found["message"]
    assert took < 2.0
    assert boxes_of(state).failures["late"] >= 1  # type: ignore[index]


@at_each
async def test_a_box_whose_creation_was_never_confirmed_is_used_or_taken_away(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_service(provider, tmp_path, monkeypatch) as (client, state, fake):
        fake.faults.append(Fault(CREATE, is_lost=True))
        found = await run(client, "print(1)")
        await until(lambda: boxes_of(state).num_held == 0)
        await boxes_of(state).look()
        left = dict(fake.boxes)

    assert found["status"] == "Success"
    assert left == {}


@at_each
async def test_a_program_whose_box_is_lost_runs_again_and_fails_by_the_sandbox_alone(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_service(provider, tmp_path, monkeypatch) as (client, state, fake):
        losses = 1

        def lose(box: FakeBox) -> None:
            nonlocal losses
            if losses:
                losses -= 1
                fake.destroy(box.id)

        fake.before_execute = lose
        once = await run(client, "print(1)")
        losses = 2
        twice = await run(client, "print(1)")
        losses = 1
        session = await opened(client)
        kept = await cell(client, session, "6 * 7")

    assert kept["run_result"]["stdout"] == "42\n", "a session begins in another box, too"
    assert (once["status"], once["run_result"]["stdout"]) == ("Success", "1\n")
    assert (twice["status"], twice["run_result"]) == ("SandboxError", None)
    assert boxes_of(state).failures["lost"] == 4  # type: ignore[index]


@at_each
async def test_a_session_whose_box_is_lost_ends_by_its_cause_and_not_as_a_failed_cell(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_service(provider, tmp_path, monkeypatch) as (client, state, fake):
        session = await opened(client, language="shell")
        await cell(client, session, "echo answer > solution")
        for box_id in list(fake.boxes):
            fake.destroy(box_id)
        graded = await cell(client, session, "cat solution")
        later = await client.post(f"{session[0]}/run", json={"code": "1"}, headers=session[1])

    assert (graded["status"], graded["run_result"], graded["is_alive"]) == ("SandboxError", None, False)
    assert (later.status_code, later.json()["code"]) == (410, "session_ended")
    assert boxes_of(state).failures["lost"] == 1  # type: ignore[index]


@at_each
async def test_a_box_that_could_not_be_taken_away_is_found_again(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_service(provider, tmp_path, monkeypatch) as (client, state, fake):
        fake.faults.append(Fault(DELETE, status=400, times=1))
        found = await run(client, "print(1)")
        await until(lambda: fake.num_made == 1 and not fake.boxes)
        await until(lambda: boxes_of(state).num_orphans == 1)

    assert found["status"] == "Success"


def started(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


@at_each
async def test_what_a_killed_service_left_is_taken_away_and_what_others_have_is_not(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, _, began = owner_here().partition(f".{os.getpid()}.")
    later, past = str(int(time.time()) + 900), str(int(time.time()) - 1)
    fake = FAKES[provider](tmp_path)

    def left(owner: str, until: str) -> str:
        labels = {MARK: MARKED, OWNER: owner, BOX: "b", UNTIL: until}
        return fake.make(f"b{fake.num_made}", labels, {}).id

    gone = [
        left(f"{host}.{os.getpid()}.{int(began) - 77}", later),  # a pid that is another process's now
        left(f"{host}.4194305.1", later),
        left("elsewhere.1.1", past),
    ]
    kept = [left(f"{host}.{os.getppid()}.{started(os.getppid())}", later), left("elsewhere.1.1", later)]
    strangers = fake.make("theirs", {"team": "other"}, {}).id

    async with a_service(provider, tmp_path, monkeypatch, fake):
        present = set(fake.boxes)
    afterwards = set(fake.boxes)
    fake.end()

    assert present == afterwards == {*kept, strangers}
    assert not present & set(gone)


@pytest.mark.parametrize("provider", [each for each in FAKES if each != "docker"])
async def test_a_key_that_is_refused_ends_the_start_and_is_nowhere_to_be_read(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    fake = FAKES[provider](tmp_path)
    fake.key = "another:key"

    with pytest.raises(ProviderFailed) as refused:
        async with a_service(provider, tmp_path, monkeypatch, fake):
            pass

    answered = "AuthError" if provider == "modal" else "401"
    assert f"{provider} answered {answered}" in refused.value.detail
    said = refused.value.detail + repr(refused.value.context) + caplog.text + repr(caplog.records)
    assert FakeProvider.key not in said


@at_each
async def test_a_provider_that_is_absent_at_the_start_is_waited_for(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FAKES[provider](tmp_path)
    fake.faults.append(Fault(LIST, status=503, times=100))

    async with a_service(provider, tmp_path, monkeypatch, fake) as (client, _, _):
        found = await run(client, "print(1)")
        fake.faults.clear()

    assert found["status"] == "Success"


@at_each
async def test_a_service_ends_though_its_provider_hangs(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_service(provider, tmp_path, monkeypatch) as (client, _, fake):
        await opened(client, language="shell")
        fake.faults.append(Fault(DELETE, hangs=True, times=100))
        began = time.monotonic()

    assert time.monotonic() - began < 5.0
    fake.end()


@at_each
async def test_warm_boxes_are_there_before_anybody_asks_and_are_replaced(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_service(provider, tmp_path, monkeypatch, warm=2) as (client, state, fake):
        await until(lambda: boxes_of(state).num_warm == 2)
        fake.faults.append(Fault(CREATE, hangs=True, times=1))  # the next one takes long
        found = await run(client, "print(1)")
        fake.faults.clear()
        await until(lambda: boxes_of(state).num_warm == 2)

    assert found["status"] == "Success"
    assert fake.boxes == {}


@at_each
async def test_a_session_of_the_usual_life_begins_in_a_warm_box(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_service(provider, tmp_path, monkeypatch, warm=1) as (client, state, fake):
        await until(lambda: boxes_of(state).num_warm == 1)
        fake.faults.append(Fault(CREATE, hangs=True, times=100))
        session = await opened(client)
        found = await cell(client, session, "6 * 7")
        fake.faults.clear()

    assert (found["run_result"]["stdout"], fake.num_made) == ("42\n", 1)


@at_each
async def test_a_grade_is_missing_where_the_sandbox_failed_and_zero_where_the_program_did(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    label = '{"inputs": ["2\\n"], "outputs": ["4\\n"]}'

    def sample(number: int, code: str) -> GradingSample:
        response = f"```python\n{code}\n```"
        fields: dict[str, Any] = {"id": f"s{number}", "prompt": "p", "response": response, "label": label}
        return GradingSample.model_validate(fields)

    samples = [sample(1, "print(int(input()) ** 2)"), sample(2, "print(5)")]
    async with a_service(provider, tmp_path, monkeypatch) as (client, _, fake):
        own = httpx.AsyncClient(transport=client._transport)
        verifier = CodeVerifier(CodeConfig(kind="code"), own, "http://sandbox", TOKEN, backoff_seconds=0.01)
        right, wrong = await verifier.score(samples)
        fake.before_execute = lambda box: (fake.destroy(box.id), None)[1]
        lost = await verifier.score(samples)
        await verifier.aclose()

    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert [grade.status for grade in lost] == [GradeStatus.ERROR, GradeStatus.ERROR]
    assert [grade.reward for grade in lost] == [None, None]
