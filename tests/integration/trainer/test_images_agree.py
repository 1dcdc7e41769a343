"""Pictures in prompts: the engine and the trainer compute the same of them, whatever else is in a batch."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.internvl.processing_internvl import InternVLProcessor

from flotilla.services.rollout.engines.base import Completion, GenerationRequest, SamplingParameters
from flotilla.services.rollout.engines.embedded.engine import TorchEngine
from flotilla.services.rollout.engines.embedded.outcomes import Generated
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.services.rollout.episodes.rendering import ChatRenderer
from flotilla.services.rollout.trajectory_builder import TrajectoryBuilder
from flotilla.services.trainer.data.batch import make_batch
from flotilla.services.trainer.data.micro_batch import RowRules, make_micro_batches
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.learning.memory import LearnerMemory
from flotilla.services.trainer.models.loading import load_model
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import DataError
from flotilla.shared.schemas.task import Message, Task
from flotilla.shared.schemas.trajectory import FinishReason, GradeStatus, Group, Trajectory
from flotilla.shared.vision.processor import ImageProcessor
from flotilla.shared.vision.tower import Features
from tests.vision_models import IMAGE_TOKEN, KINDS, a_picture, as_read, is_of_tower, save_vision_model

CPU = torch.device("cpu")
NEW_TOKENS = 10
PROMPTS = (
    (a_picture(seed=1, size=(40, 24)), a_picture(seed=2, size=(16, 48))),
    (a_picture(seed=3, size=(24, 24)),),
    (a_picture(seed=4, size=(24, 24)),),
    (),
)


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("model"), request.param)


def a_spec(folder: Path, **model: Any) -> ExperimentSpec:
    return validate_spec(
        {
            "name": "pictures",
            "model": {"path": str(folder), "dtype": "float32", **model},
            "data": {"path": "unused.jsonl", "images": {}},
            "rollout": {"group_size": 4, "sampling": {"max_new_tokens": NEW_TOKENS}},
            "reward": {"components": [{"kind": "exact"}]},
            "optimisation": {"steps": 2, "groups_per_mini_batch": 4, "learning_rate": 1e-2},
        }
    )


def an_engine(folder: Path) -> TorchEngine:
    return TorchEngine(EngineSettings(model_path=str(folder), slots=16, context_tokens=128, image_pixels=(None, None)))


def sampled(engine: TorchEngine, requests: Sequence[GenerationRequest], image: Path | None = None) -> list[Any]:
    """Answer requests; ``image`` has weights that take over after some tokens."""
    for request in requests:
        engine.submit(request)
    done: dict[str, Sequence[Completion]] = {}
    steps = 0
    while not engine.is_idle:
        if image is not None and steps == 4:
            engine.request_update(1, image, 1, OnWeightUpdate.INTERRUPT)
        steps += 1
        for outcome in engine.step():
            if isinstance(outcome, Generated):
                done[outcome.request_id] = outcome.completions
    return [done[request.request_id] for request in requests]


def answered(folder: Path, image: Path | None = None) -> list[Group]:
    renderer = ChatRenderer.from_directory(str(folder), images=a_spec(folder).data.images)
    requests, tasks = [], []
    for number, images in enumerate(PROMPTS):
        task = Task(number, number, (Message("user", "which " + "<image> " * len(images) + "colour ?"),), 4, 1)
        task = replace(task, images=images)
        ids, placed = renderer.illustrated(task.shown_messages) if images else (renderer.prompt_ids(task.messages), ())
        sampling = SamplingParameters(NEW_TOKENS, ignore_eos=True)
        requests.append(GenerationRequest(f"r{number}", ids, (1, 2, 3, 4), sampling, images=placed))
        tasks.append(Task.from_wire(task.to_wire()))
    groups = []
    for task, request, completions in zip(tasks, requests, sampled(an_engine(folder), requests, image), strict=True):
        members = [a_trajectory(request.prompt_ids, each, reward=n % 2) for n, each in enumerate(completions)]
        groups.append(Group(task, tuple(members)))
    return groups


def answered_in_turns(folder: Path) -> list[Group]:
    """Answer in two turns, of which the second is shown a picture of the member's own."""
    renderer, engine = ChatRenderer.from_directory(str(folder), images=a_spec(folder).data.images), an_engine(folder)
    sampling, groups = SamplingParameters(NEW_TOKENS, ignore_eos=True), []
    for number, images in enumerate(PROMPTS[1:3], start=len(PROMPTS)):
        task = Task(number, number, (Message("user", "which <image> colour ?"),), 4, 1, images=images)
        builders = [TrajectoryBuilder() for _ in range(task.group_size)]
        for turn in range(2):
            requests = []
            for member, builder in enumerate(builders):
                picture = a_picture(seed=member, size=(24, 16 + 8 * member))
                asked = [Message("user", "is <image> this", (picture,))]
                ids, placed = (
                    renderer.illustrated_continuation(asked, builder.token_ids[-1])
                    if turn
                    else renderer.illustrated(task.shown_messages)
                )
                builder.show(ids, images=placed)
                name, prompt = f"{number}.{turn}.{member}", builder.prompt_ids
                requests.append(GenerationRequest(name, prompt, (member,), sampling, images=builder.prompt_images))
            for builder, (made,) in zip(builders, sampled(engine, requests), strict=True):
                builder.sample(made.token_ids, made.log_probs, made.versions, made.finish_reason)
        built = [each.build(FinishReason.LENGTH, images) for each in builders]
        groups.append(Group(task, tuple(each.graded(GradeStatus.SCORED, n % 2) for n, each in enumerate(built))))
    return groups


def a_trajectory(prompt: Sequence[int], completion: Completion, reward: float) -> Trajectory:
    num = len(prompt)
    ids = np.concatenate([np.array(prompt, np.int32), completion.token_ids])
    mask, log_probs = np.zeros(len(ids), np.uint8), np.zeros(len(ids), np.float32)
    mask[num:], log_probs[num:] = 1, completion.log_probs
    versions = tuple((start + num if start else 0, version) for start, version in completion.versions)
    return Trajectory(ids, mask, log_probs, versions, FinishReason.LENGTH).graded(GradeStatus.SCORED, reward)


def a_learner(folder: Path, **model: Any) -> Learner:
    return Learner(a_spec(folder, **model), load_model(folder, dtype="float32", device=CPU))


LAYOUTS = {
    "padded": RowRules("padded"),
    "packed": RowRules("packed"),
    "shared": RowRules("packed", shares_prompts=True),
    "apart": RowRules("packed", shares_prompts=True, attends_apart=True),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("max_tokens", [60, 8192])
def test_the_trainer_gives_sampled_tokens_the_engines_log_probs(
    folder: Path, layout: RowRules, max_tokens: int
) -> None:
    learner = a_learner(folder)
    batch = make_batch([*answered(folder), *answered_in_turns(folder)], processor=learner.processor)
    if layout.attends_apart:
        assert learner.policy.attends_apart

    found = torch.zeros_like(batch.rollout_log_probs)
    micros = make_micro_batches(batch, range(batch.num_sequences), layout, max_tokens=max_tokens, device=CPU)
    for micro in micros:
        with torch.no_grad():
            found[micro.tokens] = micro.spread(learner.policy.statistics(micro.inputs, with_entropy=False).log_probs)

    torch.testing.assert_close(found, batch.rollout_log_probs, atol=1e-5, rtol=0)


def test_sampled_tokens_have_the_log_probs_of_transformers_own_forward(folder: Path) -> None:
    model, processor = AutoModelForImageTextToText.from_pretrained(folder).eval(), ImageProcessor.from_directory(folder)
    checked = 0
    for group in filter(lambda each: each.task.images, answered(folder)):
        shown = [processor.process(image) for image in group.task.images]
        for each in group.trajectories:
            is_sampled = torch.from_numpy(each.loss_mask.astype(bool))
            ids = torch.from_numpy(each.token_ids.astype(np.int64))
            if IMAGE_TOKEN in ids[is_sampled]:
                continue  # It would look for a picture there.
            with torch.no_grad():
                logits = model(input_ids=ids[None], **as_read(shown, ids)).logits[0]
            found = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[is_sampled[1:], 0]
            torch.testing.assert_close(found, torch.from_numpy(each.log_probs)[is_sampled], atol=1e-5, rtol=0)
            checked += 1
    assert checked >= 3


def test_the_policy_samples_ids_of_image_tokens_as_any_others(folder: Path) -> None:
    sampled_ids = np.concatenate([t.token_ids[t.loss_mask == 1] for g in answered(folder) for t in g.trajectories])

    assert IMAGE_TOKEN in sampled_ids


def test_samples_that_go_on_under_new_weights_see_their_pictures(folder: Path, tmp_path: Path) -> None:
    other = save_vision_model(tmp_path / "other", folder_kind(folder), seed=1)
    learners = [a_learner(folder), a_learner(other)]
    groups = answered(folder, other / "model.safetensors")
    batch = make_batch(groups, processor=learners[0].processor)
    assert set(batch.versions.tolist()) == {0, 1}

    [micro] = make_micro_batches(batch, range(batch.num_sequences), RowRules("packed"), max_tokens=8192, device=CPU)
    with torch.no_grad():
        old, new = (each.policy.statistics(micro.inputs, with_entropy=False).log_probs for each in learners)

    labels = batch.rollout_log_probs[micro.tokens]
    expected = torch.where(batch.versions[micro.tokens] == 1, new, old)
    torch.testing.assert_close(labels, expected, atol=1e-5, rtol=0)


def test_an_engine_asleep_keeps_nothing_that_was_computed_of_pictures(folder: Path) -> None:
    engine = an_engine(folder)
    renderer = ChatRenderer.from_directory(str(folder), images=a_spec(folder).data.images)
    ids, placed = renderer.illustrated((Message("user", "which <image> colour ?", PROMPTS[1]),))
    before = num_features()
    sampled(engine, [GenerationRequest("r", ids, (1,), SamplingParameters(2, ignore_eos=True), images=placed)])
    assert num_features() == before + 1

    engine.sleep()

    assert num_features() == before


def test_a_trainer_that_gives_its_device_up_keeps_nothing_of_pictures(folder: Path, tmp_path: Path) -> None:
    learner, memory_before = a_learner(folder), num_features()
    learner.train(answered(folder)[:1], 1)
    assert num_features() > memory_before
    memory = LearnerMemory(learner, tmp_path)

    memory.offload()

    assert num_features() == memory_before
    memory.reload()
    learner.train(answered(folder)[:1], 2)


def num_features() -> int:
    gc.collect()
    # Not isinstance: objects that torch deprecates warn when they are asked for their class.
    return sum(issubclass(type(each), Features) for each in gc.get_objects())


def folder_kind(folder: Path) -> str:
    return str(AutoModelForImageTextToText.from_pretrained(folder).config.model_type)


@pytest.mark.parametrize("tower", ["frozen", "trained"])
def test_the_tower_trains_where_the_spec_says_so(folder: Path, tower: str) -> None:
    learner = a_learner(folder, vision_tower=tower)
    before = {name: each.clone() for name, each in learner.loaded.model.named_parameters()}

    learner.train(answered(folder), 1)

    moved = {name for name, each in learner.loaded.model.named_parameters() if not torch.equal(each, before[name])}
    assert any("language_model" in name for name in moved)
    assert any(map(is_of_tower, moved)) is (tower == "trained")


def test_other_bounds_on_pixels_than_the_rollouts_are_refused(folder: Path) -> None:
    processor = ImageProcessor.from_directory(folder, max_pixels=256)

    with pytest.raises(DataError, match="bounds on pixels"):
        make_batch(answered(folder), processor=processor)


def test_ids_and_pixels_of_500_rows_are_those_of_transformers_processor(folder: Path) -> None:
    renderer = ChatRenderer.from_directory(str(folder), images=a_spec(folder).data.images)
    ours = ImageProcessor.from_directory(folder)
    theirs = theirs_of(folder)
    generator = np.random.default_rng(0)
    for row in range(500):
        sizes = [tuple(int(each) for each in generator.integers(8, 100, 2)) for _ in range(generator.integers(1, 4))]
        images = tuple(a_picture(seed=row, size=size) for size in sizes)

        ids, placed = renderer.illustrated((Message("user", "which " + "<image> " * len(images), images),))

        read = [theirs(pixels(image)) for image in images]
        assert [image.num_tokens for image in placed] == [num_tokens for num_tokens, _ in read]
        assert ids.count(IMAGE_TOKEN) == sum(num_tokens for num_tokens, _ in read)
        for image, (_, expected) in zip(images, read, strict=True):
            np.testing.assert_array_equal(ours.process(image).pixel_values, expected)


class WithoutVideos(InternVLProcessor):
    """Transformers' own processor without that of videos, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: object) -> type:
        return type(argument)


def theirs_of(folder: Path) -> Callable[[Any], tuple[int, Any]]:
    """Return what counts the tokens of a picture, and makes its pixels, as transformers does."""
    made = AutoImageProcessor.from_pretrained(folder, backend="pil")
    if folder_kind(folder) != "internvl":

        def grid(picture: Any) -> tuple[int, Any]:
            found = made(images=[picture], return_tensors="np")
            return int(found["image_grid_thw"][0].prod()) // 4, found["pixel_values"]

        return grid
    whole = WithoutVideos(made, AutoTokenizer.from_pretrained(folder), image_seq_length=4)

    def tiles(picture: Any) -> tuple[int, Any]:
        found = whole(images=[picture], text="<|image_pad|>", return_tensors="np")
        return int((found["input_ids"] == IMAGE_TOKEN).sum()), found["pixel_values"]

    return tiles


def pixels(data: bytes) -> Any:
    from flotilla.shared.vision.files import pixels_of

    return pixels_of(data)
