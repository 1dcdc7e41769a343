"""Real SGLang and vLLM servers compute images as the trainer does, whatever they keep, load or are interrupted by."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from flotilla.services.rollout.engines.base import Completion, GenerationRequest, Prefix, ResumeRule, SamplingParameters
from flotilla.services.rollout.engines.servers.engine import ServerEngine
from flotilla.services.rollout.engines.sglang.engine import SglangDialect
from flotilla.services.rollout.engines.vllm.engine import VllmDialect
from flotilla.services.rollout.episodes.rendering import ChatRenderer
from flotilla.services.trainer.data.batch import make_batch
from flotilla.services.trainer.data.micro_batch import RowRules, make_micro_batches
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models.loading import load_model
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.config.sections.images import ImagesConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.schemas.task import Message, Task
from flotilla.shared.schemas.trajectory import Group
from tests.contract.engine.conftest import begin_running, python_with_torchvision, server_settings, until_running
from tests.integration.trainer.test_images_agree import CPU, a_trajectory
from tests.vision_models import IMAGE_TOKEN, SPECIAL, a_picture, save_vision_model

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

DIALECTS: dict[str, Any] = {"sglang": SglangDialect, "vllm": lambda: VllmDialect(raw=False)}
SERVED = ("qwen2_5_vl", "qwen3_vl")
"""Kinds of models that servers are asked to compute images of."""
CLOSE = 1e-4
PATCH = 14
"""SGLang takes pixels of Qwen2.5-VL's patches of another side for embeddings."""
FIRST, OTHER = a_picture(seed=3, size=(84, 84)), a_picture(seed=4, size=(84, 84))
"""Of one size, so that prompts with them have the same ids."""
IMAGES = ImagesConfig(max_pixels=64 * PATCH**2)
"""The largest picture here is reduced by this bound, and not by the processor's own."""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=[pytest.param(each, marks=getattr(pytest.mark, each)) for each in DIALECTS])
def server(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    python_with_torchvision(name)
    return name


@pytest.fixture(scope="module", params=SERVED)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The narrowest heads that vLLM's kernels for CPUs have are of 32.
    return save_vision_model(tmp_path_factory.mktemp("model"), request.param, hidden=128, patch=PATCH)


@pytest.fixture(scope="module")
def other(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights, of its tower and of all else: its head is its embedding."""
    made = tmp_path_factory.mktemp("other")
    for file in folder.iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(7)
    sizes = {name: 0.1 if "visual." in name else 0.02 for name in tensors}
    changed = {name: each + sizes[name] * torch.randn_like(each) for name, each in tensors.items()}
    save_file(changed, made / "model.safetensors")
    return made


@pytest.fixture(scope="module")
async def started(server: str, folder: Path) -> AsyncIterator[ServerEngine]:
    settings = server_settings(folder, server, context_tokens=480, slots=8, images=IMAGES)
    made = ServerEngine(settings, DIALECTS[server]())
    await made.start()
    yield made
    await made.close()


@pytest.fixture
async def engine(started: ServerEngine, folder: Path) -> ServerEngine:
    """The module's engine, with the weights that it began with, at version 3."""
    await started.load_weights(folder / "model.safetensors", 3, OnWeightUpdate.DRAIN)
    return started


class Asked:
    """Prompts of a model, as requests and as tasks of the trainer."""

    def __init__(self, folder: Path) -> None:
        self._renderer = ChatRenderer.from_directory(str(folder), images=IMAGES)
        self._number = 0

    def __call__(
        self, *images: bytes, seeds: Sequence[int] = (1, 2), new_tokens: int = 12, **fields: Any
    ) -> tuple[Task, GenerationRequest]:
        self._number += 1
        words = (Message("user", "which " + "<image> " * len(images) + "colour ?"),)
        task = Task(self._number, self._number, words, len(seeds), 1, images=images)
        ids, placed = self._renderer.illustrated(task.shown_messages)
        greedy = fields.pop("greedy", False)
        sampling = SamplingParameters(new_tokens, greedy=greedy, ignore_eos=True)
        name = f"request-{self._number}"
        return task, GenerationRequest(name, ids, tuple(seeds), sampling, images=placed, **fields)


@pytest.fixture(scope="module")
def asked(folder: Path) -> Asked:
    return Asked(folder)


def rescored(
    folder: Path, asked: tuple[Task, GenerationRequest], completions: Sequence[Completion]
) -> list[npt.NDArray[np.float32]]:
    """Ask the trainer for the log-probabilities of what was sampled."""
    task, request = asked
    learner = Learner(a_spec(folder), load_model(folder, dtype="float32", device=CPU))
    group = Group(task, tuple(a_trajectory(request.prompt_ids, each, reward=0) for each in completions))
    batch = make_batch([group], processor=learner.processor)
    found = torch.zeros_like(batch.rollout_log_probs)
    rows = RowRules("padded")
    for micro in make_micro_batches(batch, range(batch.num_sequences), rows, max_tokens=8192, device=CPU):
        with torch.no_grad():
            found[micro.tokens] = micro.spread(learner.policy.statistics(micro.inputs, with_entropy=False).log_probs)
    lengths = [each.token_ids.size for each in completions]
    return [each.numpy() for each in torch.split(found[batch.sequences.response_mask], lengths)]


def a_spec(folder: Path) -> ExperimentSpec:
    return validate_spec(
        {
            "name": "pictures",
            "model": {"path": str(folder), "dtype": "float32"},
            "data": {"path": "unused.jsonl", "images": IMAGES.model_dump()},
            "reward": {"components": [{"kind": "exact"}]},
            "optimisation": {"steps": 2},
        }
    )


def farthest(ours: Sequence[npt.NDArray[np.float32]], completions: Sequence[Completion]) -> float:
    return max(float(np.abs(a - b.log_probs).max()) for a, b in zip(ours, completions, strict=True))


PROMPTS = {
    "one": (FIRST,),
    "two": (a_picture(seed=1, size=(140, 84)), a_picture(seed=2, size=(56, 168))),
    "one twice": (FIRST, FIRST),
    "reduced": (a_picture(seed=5, size=(210, 154)),),
    "of another format": (a_picture(seed=6, size=(70, 112), form="GIF"),),
}


@pytest.mark.parametrize("images", PROMPTS.values(), ids=list(PROMPTS))
async def test_log_probs_are_the_trainers(
    engine: ServerEngine, folder: Path, asked: Asked, images: tuple[bytes, ...]
) -> None:
    prompt = asked(*images)

    completions = await engine.generate(prompt[1])

    assert [each.token_ids.size for each in completions] == [12, 12]
    assert farthest(rescored(folder, prompt, completions), completions) < CLOSE


async def test_images_of_the_same_tokens_are_told_apart_by_what_is_kept(engine: ServerEngine, asked: Asked) -> None:
    """Ids and lengths are the same: whatever is kept of prompts goes by the images, too."""
    found = []
    for image in (FIRST, OTHER, FIRST):
        _, request = asked(image, seeds=(1,), greedy=True)
        [completion] = await engine.generate(request)
        found.append((request.prompt_ids, completion))

    (ids, first), (other_ids, other), (_, again) = found
    assert ids == other_ids
    assert abs(first.log_probs[0] - other.log_probs[0]) > 1e-3
    np.testing.assert_allclose(again.log_probs, first.log_probs, atol=1e-5)


@pytest.mark.parametrize("mode", [OnWeightUpdate.DRAIN, OnWeightUpdate.INTERRUPT])
async def test_another_tower_is_served_and_the_one_before_is_forgotten(
    engine: ServerEngine, folder: Path, other: Path, asked: Asked, mode: OnWeightUpdate
) -> None:
    await engine.generate(asked(FIRST)[1])

    await engine.load_weights(other / "model.safetensors", 4, mode)

    prompt = asked(FIRST)
    completions = await engine.generate(prompt[1])
    assert {each.versions for each in completions} == {((0, 4),)}
    assert farthest(rescored(other, prompt, completions), completions) < CLOSE
    assert farthest(rescored(folder, prompt, completions), completions) > 1e-3


async def test_what_is_interrupted_goes_on_with_its_images(
    engine: ServerEngine, folder: Path, other: Path, asked: Asked
) -> None:
    prompt = asked(FIRST, OTHER, seeds=(1, 2), new_tokens=400)
    task = await begin_running(engine, prompt[1], running=2)
    await until_running(engine, running=2, new_tokens=40)

    await engine.load_weights(other / "model.safetensors", 4, OnWeightUpdate.INTERRUPT)

    completions = await task
    under = {3: rescored(folder, prompt, completions), 4: rescored(other, prompt, completions)}
    for number, completion in enumerate(completions):
        assert [version for _, version in completion.versions] == [3, 4]
        [_, (start, _)] = completion.versions
        log_probs = np.concatenate([under[3][number][:start], under[4][number][start:]])
        assert np.abs(log_probs - completion.log_probs).max() < CLOSE


async def test_what_was_kept_is_sent_again_behind_its_images(engine: ServerEngine, folder: Path, asked: Asked) -> None:
    _, begun = asked(FIRST, seeds=(1, 2, 3), new_tokens=6)
    before = await engine.generate(begun)
    kept = [Prefix(tuple(map(int, each.token_ids)), tuple(map(float, each.log_probs)), ((0, 3),)) for each in before]

    prompt = asked(FIRST, seeds=(1, 2, 3), prefixes=tuple(kept), resume=ResumeRule(mixes_versions=True))
    completions = await engine.generate(prompt[1])

    for completion, prefix in zip(completions, kept, strict=True):
        marks = {IMAGE_TOKEN, SPECIAL.index("<|vision_start|>"), SPECIAL.index("<|video_pad|>")}
        goes_on = engine._dialect.places_images or not marks & set(prefix.token_ids)
        assert completion.num_resumed == (6 if goes_on else 0)
        assert completion.token_ids.size == 12
    assert farthest(rescored(folder, prompt, completions), completions) < CLOSE


async def test_a_sampled_token_of_an_image_is_a_token_like_any_other(
    engine: ServerEngine, folder: Path, asked: Asked
) -> None:
    prompt = asked(FIRST, seeds=(1,), prefixes=(Prefix((8, IMAGE_TOKEN, 9), (-1.0, -1.0, -1.0), ((0, 3),)),))

    [completion] = await engine.generate(prompt[1])

    if engine._dialect.places_images:
        assert completion.token_ids[:3].tolist() == [8, IMAGE_TOKEN, 9]
    [ours] = rescored(folder, prompt, [completion])
    assert np.abs(ours - completion.log_probs)[completion.num_resumed :].max() < CLOSE


async def test_the_server_proves_the_tower_that_it_loaded(engine: ServerEngine, other: Path) -> None:
    assert await engine.load_proved(other / "model.safetensors", 4, OnWeightUpdate.DRAIN, "unused")

    assert engine._proof is not None
    provable = engine._proof._provable or frozenset()
    assert any("visual" in name for name in provable) and any("visual" not in name for name in provable)


async def test_an_image_that_the_prompt_was_not_written_with_is_refused(engine: ServerEngine, asked: Asked) -> None:
    _, request = asked(FIRST)
    [image] = request.images
    wrong = GenerationRequest(
        "wrong", request.prompt_ids, (1,), request.sampling, images=(type(image)(image.start, 3, image.data),)
    )

    with pytest.raises(InvalidRequest, match="3 tokens in the prompt, and 9 here"):
        await asyncio.wait_for(engine.generate(wrong), 60)
