"""A teacher behind a URL teaches as one that the trainer holds, and one that dies is waited for."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.net.server.ports import lasting_port
from flotilla.shared.schemas.service import TEACHER
from tests.faults.test_kill import patiently, until_completed, until_step
from tests.faults.test_loss_curve import curve_of, start
from tests.faults.trial import waited
from tests.fleet import ROOT, make_experiment, running_fleet, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(580)]

STEPS = 8
TOLERANCE = 1e-5
COMPARED = ("loss/total", "grad_norm", "distillation/kl", "advantage/mean_square")


def other_model(student: Path, directory: Path) -> Path:
    """Copy a model with other weights."""
    shutil.copytree(student, directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    model.save_pretrained(directory)
    return directory


@contextmanager
def serving(model: Path, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a teacher while the block lasts."""
    process = subprocess.Popen([sys.executable, "-m", "tests.teacher_server", str(model), str(port)], cwd=ROOT)

    def answers() -> bool:
        try:
            body = {"tokens": [1]}
            return httpx.post(f"http://127.0.0.1:{port}/detokenize", json=body, timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(answers, 120, "the teacher to answer")
        yield process
    finally:
        process.kill()
        process.wait()


async def problem_of(client: GatewayClient, experiment_id: str) -> dict[str, Any] | None:
    problem = (await patiently(client, f"/v1/experiments/{experiment_id}"))["problem"]
    return problem if problem is not None and problem["component"] == TEACHER else None


async def test_a_teacher_behind_a_url_teaches_the_same_and_may_die(tmp_path: Path) -> None:
    port = lasting_port("127.0.0.1")
    spec = make_experiment(
        tmp_path,
        rollout={"engine": {"slots": 16, "context_tokens": 128, "batch_invariant": True}},
        optimisation={"steps": STEPS, "learning_rate": 1e-3},
        asynchrony={"staleness_threshold": 0.0, "on_weight_update": "drain"},
    )
    teacher = other_model(Path(spec["model"]["path"]), tmp_path / "teacher")
    inside = spec | {"algorithm": {"distillation": {"path": str(teacher), "coefficient": 0.5}}}
    server = {"url": f"http://127.0.0.1:{port}", "kind": "sglang", "allow_private": True}
    outside = spec | {"algorithm": {"distillation": {"servers": [server], "coefficient": 0.5}}}

    with running_fleet(tmp_path / "fleet", FLOTILLA_STALL_SECONDS="5") as fleet:
        async with fleet.client() as client:
            expected_id = await start(client, inside)
            await until_completed(client, expected_id)
            expected = await curve_of(client, expected_id, STEPS, COMPARED)
            with serving(teacher, port) as process:
                found_id = await start(client, outside)
                await until_step(client, found_id, 3)
                process.send_signal(signal.SIGKILL)
                problem = await waited(lambda: problem_of(client, found_id), 120, "the teacher to be named")
                waiting = (await patiently(client, f"/v1/experiments/{found_id}/ledger"))["train"]
                # What a trainer that dies meanwhile replays needs no teacher.
                fleet.kill("flotilla.services.trainer.worker")
            with serving(teacher, port):
                view = await until_completed(client, found_id)
            found = await curve_of(client, found_id, STEPS, COMPARED)
            ledger = (await patiently(client, f"/v1/experiments/{found_id}/ledger"))["train"]

    assert f"the teacher http://127.0.0.1:{port} does not answer" in problem["cause"]
    assert waiting["balanced"]
    assert waiting["claimed"]["generated"] > 0
    assert view["step"] == STEPS
    assert view["problem"] is None
    assert ledger["balanced"]
    assert ledger["trained"] == STEPS * spec["optimisation"]["groups_per_mini_batch"]
    assert not (ledger["failed"] or ledger["dropped"] or ledger["filtered"])
    for step in range(1, STEPS + 1):
        assert found[step]["groups"] == expected[step]["groups"]
        for name in COMPARED:
            assert found[step][name] == pytest.approx(expected[step][name], abs=TOLERANCE, rel=TOLERANCE), (step, name)
    assert len({found[step]["distillation/kl"] for step in found}) == STEPS
