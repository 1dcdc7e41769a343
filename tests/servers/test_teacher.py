"""Real SGLang and vLLM servers as teachers: what they say of given tokens is what the model says of them."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.arithmetic.model import build_model
from examples.arithmetic.problems import training_set, worked_solution
from examples.arithmetic.settings import settings_of
from examples.arithmetic.tokenizer import build_tokenizer
from flotilla.services.reward.teacher.teachers import Teachers
from flotilla.services.reward.verifiers.registry import new_client
from flotilla.services.rollout.engines.servers.settings import ServerSettings
from flotilla.services.rollout.engines.sglang import engine as sglang
from flotilla.services.rollout.engines.vllm import engine as vllm
from flotilla.shared.config.sections.distillation import TeacherServerConfig
from flotilla.shared.errors import ModelError
from flotilla.shared.net.server.ports import lasting_port
from flotilla.shared.schemas.trajectory import GradeStatus, Group, Trajectory
from flotilla.shared.testing.builders import a_task, a_trajectory
from tests.contract.engine.conftest import python_of
from tests.fleet import until

pytestmark = pytest.mark.timeout(900)

KINDS = [pytest.param("sglang", marks=pytest.mark.sglang), pytest.param("vllm", marks=pytest.mark.vllm)]
ARGUMENTS = {
    "sglang": (sglang.MODULE, "--model-path", "--context-length 256 --max-total-tokens 4096 --skip-server-warmup "
               "--device cpu --attention-backend torch_native --sampling-backend pytorch --grammar-backend none "
               "--mem-fraction-static 0.2"),
    "vllm": (vllm.MODULE, "--model", "--max-model-len 256 --max-num-seqs 8 --enforce-eager "
             "--kv-cache-memory-bytes 268435456"),
}  # fmt: skip
START_SECONDS = 800


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with heads as wide as vLLM needs them, and its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    settings = settings_of("wide-heads", 0)
    problems = training_set(200, settings.problems, Random(0))
    tokenizer = build_tokenizer([p.prompt + worked_solution(p) for p in problems], settings.model.vocab_size)
    build_model(settings.model, tokenizer, seed=0).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@contextmanager
def serving(kind: str, model: Path, log: Path) -> Iterator[str]:
    python, port = python_of(kind), lasting_port("127.0.0.1")
    module, name, more = ARGUMENTS[kind]
    where = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    settings = ServerSettings(model, python)
    if kind == "sglang":
        environment = sglang.environment(settings, os.environ, log.parent)
    else:
        environment = vllm.environment(settings, os.environ)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(python), "-m", module, name, str(model), *where, *more.split()],
            env=environment,
            cwd=log.parent,
            stdout=output,
            stderr=output,
        )
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            return httpx.get(f"{url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(answers, START_SECONDS, f"{kind} to answer", pause_seconds=1.0)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def sampled(tokenizer: Any, answer: str) -> Trajectory:
    """Make a trajectory of a prompt and an answer, as a rollout would record it."""
    prompt, ids = tokenizer("Ana has 3 pens, buys 4.")["input_ids"], tokenizer(answer)["input_ids"]
    made = a_trajectory(prompt_tokens=len(prompt), sampled_tokens=len(ids), reward=1.0)
    return replace(made, token_ids=np.array([*prompt, *ids], np.int32), text=tokenizer.decode(ids))


def expected_of(model: Any, trajectory: Trajectory) -> Any:
    ids = torch.from_numpy(trajectory.token_ids).long()[None]
    with torch.no_grad():
        log_probs = torch.log_softmax(model(ids).logits[0, :-1].float(), -1)
    found = np.concatenate([[0.0], log_probs.gather(-1, ids[0, 1:, None])[:, 0].numpy()])
    return np.where(trajectory.loss_mask == 1, found, 0.0)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_real_server_is_a_teacher(kind: str, model_path: Path, tmp_path: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    members = tuple(sampled(tokenizer, text) for text in ("3 + 4 = 7. #### 7", "Ana buys 12 pens"))
    group = Group(a_task(group_size=2), members)
    with serving(kind, model_path, tmp_path / "server.log") as url:
        for asked in (kind, "openai"):
            config = TeacherServerConfig(url=url, kind=asked, allow_private=True)  # type: ignore[arg-type]
            teachers = Teachers([config], new_client())
            judged = await teachers.judged(group)
            for trajectory in judged.trajectories:
                assert trajectory.status is GradeStatus.SCORED, trajectory.reason
                assert trajectory.teacher_log_probs is not None
                np.testing.assert_allclose(trajectory.teacher_log_probs, expected_of(model, trajectory), atol=1e-4)
            await teachers.aclose()

        # Tokens of another tokenizer: the same ids, and another text.
        other = Teachers([config], new_client())
        with pytest.raises(ModelError, match="token ids must be those of model"):
            await other.judged(replace(group, trajectories=(replace(members[0], text="bonjour"),)))
        await other.aclose()
