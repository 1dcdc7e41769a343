"""Pictures that an environment or a tool shows in later turns: tokens, positions and log-probs from rollout to trainer.

The engine's log-probabilities are those of the trainer, in each of its layouts, and of transformers' own forward.
Weights change in the middle of turns, and episodes are interrupted and go on.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from flotilla.services.rollout.agents.episode import Episode, Threads
from flotilla.services.rollout.agents.template import ChatTemplate
from flotilla.services.rollout.engines.base import Engine, ResumeRule
from flotilla.services.rollout.engines.embedded.engine import TorchEngine
from flotilla.services.rollout.engines.process.in_process import InProcessEngine
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.services.rollout.environments.conversation import EnvironmentConversation
from flotilla.services.rollout.episodes.conversation import Conversation
from flotilla.services.rollout.episodes.multi_turn import Limits, MultiTurnEpisodes
from flotilla.services.rollout.episodes.rendering import ChatRenderer, opened, rendered
from flotilla.services.rollout.episodes.turns import Turns
from flotilla.services.rollout.tools.conversation import ToolConversations
from flotilla.services.trainer.data.batch import make_batch, pieces
from flotilla.services.trainer.data.micro_batch import RowRules, make_micro_batches
from flotilla.services.trainer.learning.learner import Learner
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.config.sections.images import ImagesConfig
from flotilla.shared.config.sections.rollout import SamplingConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import DataError, InvalidRequest
from flotilla.shared.schemas.task import IMAGE_MARK, Message, Task
from flotilla.shared.schemas.trajectory import FinishReason, GradeStatus, Group
from flotilla.shared.streams.codec import (
    decode_group,
    decode_partials,
    encode_body,
    encode_grades,
    encode_task,
)
from flotilla.shared.testing.builders import a_task
from flotilla.shared.vision.parts import uri_of
from flotilla.shared.vision.processor import ImageProcessor
from tests.integration.rollout.test_recorded_log_probs import TOOLS, Adder, Calling
from tests.integration.trainer.test_images_agree import LAYOUTS, a_learner
from tests.unit.rollout.agents.world import ask
from tests.vision_models import IMAGE_TOKEN, KINDS, WORDS, a_picture, as_read, is_of_tower, save_vision_model

pytestmark = pytest.mark.slow

CONTEXT, MEMBERS, TURNS, NEW_TOKENS = 320, 4, 3, 16
SAMPLING = SamplingConfig(max_new_tokens=NEW_TOKENS, ignore_eos=True)
SHORT = SAMPLING.model_copy(update={"max_new_tokens": 3})
CPU = torch.device("cpu")
TOLERANCE = 1e-5


@dataclass(frozen=True)
class World:
    """Folders of a kind's models, by version, and the trainers of each."""

    folders: tuple[Path, ...]
    learners: tuple[Learner, ...]

    @property
    def renderer(self) -> ChatRenderer:
        """Of all of them."""
        return ChatRenderer.from_directory(str(self.folders[0]), images=ImagesConfig())


@pytest.fixture(scope="module", params=KINDS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    folders = tuple(save_vision_model(tmp_path_factory.mktemp("model"), request.param, seed=seed) for seed in range(2))
    return World(folders, tuple(a_learner(each) for each in folders))


@pytest.fixture
async def engine(world: World, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    step = TorchEngine.step

    def slowly(self: TorchEngine) -> Any:
        # A turn outlasts the message that changes the weights under it.
        time.sleep(0.002)
        return step(self)

    monkeypatch.setattr(TorchEngine, "step", slowly)
    settings = EngineSettings(
        str(world.folders[0]), slots=8, context_tokens=CONTEXT, image_pixels=(None, None), prefix_cache_mb=64
    )
    made = InProcessEngine(settings)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


def drawn(text: str, turn: int) -> bytes:
    """Draw another picture, of another size, for another answer and another turn."""
    seed = sum(map(ord, text)) * 10 + turn
    return a_picture(seed=seed, size=(16 + 8 * (seed % 3), 16 + 8 * turn))


class Gallery:
    """Shows a new picture in every turn; at first a text alone, or a picture, too."""

    begins_with_picture = False

    def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        self.turn = 0
        if not self.begins_with_picture:
            return "first", {}
        return [{"type": "text", "text": "first "}, {"type": "image", "image": drawn("", 0)}], {}

    def step(self, text: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        shown = [{"type": "text", "text": "which"}, {"type": "image", "image": drawn(text, self.turn)}]
        return [*shown, {"type": "text", "text": " colour ?"}], 1.0, False, False, {}


QUOTED = "is this <image> or <|image_pad|> , <|vision_start|> ?"
"""What a policy may have written, and whoever hears it repeats."""


class Quoting(Gallery):
    """Says what stands for a picture: at first beside one, then without any."""

    def step(self, text: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        shown, *others = super().step(text)
        return (QUOTED if self.turn == 2 else [{"type": "text", "text": QUOTED}, *shown]), *others


class Vernissage(Gallery):
    """Begins with a picture."""

    begins_with_picture = True


class Painter(Adder):
    """A tool that answers with a picture."""

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        picture = a_picture(seed=arguments["a"], size=(24, 16))
        return [{"type": "text", "text": "second "}, {"type": "image", "image": picture}]


def in_a_gallery(task: Task, member: int) -> Conversation:
    return EnvironmentConversation(Gallery, task, 5.0, is_quick=True)


def at_a_vernissage(task: Task, member: int) -> Conversation:
    return EnvironmentConversation(Vernissage, task, 5.0, is_quick=True)


def among_quotes(task: Task, member: int) -> Conversation:
    return EnvironmentConversation(Quoting, task, 5.0, is_quick=True)


def with_a_painter(task: Task, member: int) -> Conversation:
    return Calling(ToolConversations(Painter(), TOOLS)(task, member))


def episodes(
    world: World,
    engine: Engine,
    converse: Callable[[Task, int], Conversation] = in_a_gallery,
    sampling: SamplingConfig = SAMPLING,
    **limits: Any,
) -> MultiTurnEpisodes:
    bounds = {"max_turns": TURNS, "max_tokens": CONTEXT, "max_images": 16} | limits
    return MultiTurnEpisodes(
        engine,
        world.renderer,
        Turns(sampling, sampling),
        Limits(**bounds),
        converse,
        ResumeRule(mixes_versions=True, max_lag=3),
    )


def the_task(*images: bytes) -> Task:
    content = "which " + f"{IMAGE_MARK} " * len(images) + "is"
    messages = (Message("user", content),)
    return replace(a_task(0, group_size=MEMBERS, messages=messages, metadata={"seed": 5}), images=images)


def travelled(group: Group) -> Group:
    """Grade a group, and send it to the trainer."""
    scored = [each.graded(GradeStatus.SCORED, float(at % 2)) for at, each in enumerate(group.trajectories)]
    graded = replace(group, trajectories=tuple(scored))
    return decode_group(encode_body(graded), encode_grades(graded))


def of_the_trainer(learner: Learner, group: Group, layout: RowRules) -> np.ndarray:
    batch = make_batch([group], processor=learner.processor)
    found = torch.zeros(len(batch.positions))
    with torch.no_grad():
        for micro in make_micro_batches(batch, range(batch.num_sequences), layout, max_tokens=2 * CONTEXT, device=CPU):
            found[micro.tokens] = micro.spread(learner.policy.statistics(micro.inputs, with_entropy=False).log_probs)
    return found[batch.sequences.response_mask].numpy()


def check(group: Group, world: World, versions: Sequence[int]) -> None:
    masks = [each.loss_mask.astype(bool) for each in group.trajectories]
    pairs = list(zip(group.trajectories, masks, strict=True))
    recorded = np.concatenate([each.log_probs[mask] for each, mask in pairs])
    sampled_by = np.concatenate([each.token_versions()[mask] for each, mask in pairs])
    assert sorted(set(sampled_by.tolist())) == list(versions)
    for name, layout in LAYOUTS.items():
        by_version = np.stack([of_the_trainer(each, travelled(group), layout) for each in world.learners])
        expected = by_version[sampled_by, np.arange(len(recorded))]
        np.testing.assert_allclose(recorded, expected, atol=TOLERANCE, rtol=0, err_msg=name)


async def until_turn(engine: Engine, turns: float) -> None:
    before = (await engine.load()).generated_tokens
    async with asyncio.timeout(60):
        while (await engine.load()).generated_tokens - before < turns * NEW_TOKENS * MEMBERS:
            await asyncio.sleep(0)


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("converse", [in_a_gallery, at_a_vernissage, with_a_painter])
async def test_turns_with_new_pictures_agree_with_the_trainer_while_weights_change_under_them(
    world: World, engine: Engine, converse: Callable[[Task, int], Conversation], branches: bool
) -> None:
    task = the_task(a_picture(seed=1, size=(24, 16)), a_picture(seed=2))
    running = asyncio.create_task(episodes(world, engine, converse, may_branch=branches).run(task))
    await until_turn(engine, 1.4)
    await engine.load_weights(world.folders[1] / "model.safetensors", 1, OnWeightUpdate.INTERRUPT)
    group = await running

    before = 2 + (converse is at_a_vernissage)
    for each in group.trajectories:
        assert each.finish_reason is FinishReason.TURNS
        assert each.num_sampled == TURNS * NEW_TOKENS
        last = -1
        for piece in pieces(each):
            last += len(piece.turns)
            assert len(piece.images) == before + last, "a new sequence is shown all of them again"
        for image in each.images:
            assert set(each.token_ids[image.start : image.end].tolist()) == {IMAGE_TOKEN}
            assert not each.loss_mask[image.start : image.end].any(), "images are shown, not sampled"
    assert any(turn.is_fresh for each in group.trajectories for turn in each.turns) is branches
    check(group, world, [0, 1])


@pytest.mark.parametrize("branches", [False, True])
async def test_words_that_look_like_a_picture_are_text_beside_one_and_without(
    world: World, engine: Engine, branches: bool
) -> None:
    group = await episodes(world, engine, among_quotes, may_branch=branches).run(the_task(a_picture(seed=1)))

    assert (await engine.load()).reuses, "turns go on from what was computed of those before, pictures included"
    for each in group.trajectories:
        assert len(each.images) == 2 or branches
        shown = each.token_ids[each.loss_mask == 0]
        assert (shown == IMAGE_TOKEN).sum() == sum(image.num_tokens for image in each.images)
    check(group, world, [0])


def test_what_a_policy_wrote_is_text_where_its_conversation_is_rendered_again(world: World) -> None:
    renderer, pictures = world.renderer, (a_picture("red"), a_picture("blue"))
    first, second = (Message("user", "which <image>", (each,)) for each in pictures)
    chat = [first, Message("assistant", QUOTED), second]

    token_ids, placed = rendered(renderer, chat)

    assert [each.data for each in placed] == [*pictures]
    assert token_ids.count(IMAGE_TOKEN) == sum(each.num_tokens for each in placed)
    assert token_ids.count(renderer.token_ids("<|vision_start|>")[0]) == 2
    with pytest.raises(DataError, match=r"the row's text has <\|image_pad\|>"):
        opened(renderer, replace(the_task(pictures[0]), messages=(Message("user", "<image> <|image_pad|>"),)), chat)


@pytest.mark.parametrize("images", [(), (a_picture(seed=1),)], ids=["text first", "picture first"])
async def test_an_episode_that_is_interrupted_and_resumed_is_the_uninterrupted_one(
    world: World, engine: Engine, images: tuple[bytes, ...]
) -> None:
    task = the_task(*images)
    whole = await episodes(world, engine).run(task)
    first = episodes(world, engine)
    running = asyncio.create_task(first.run(task))
    await until_turn(engine, 1.5)
    await first.interrupt()
    had = (await running).trajectories
    assert all(each.finish_reason is FinishReason.ABORTED for each in had)
    assert any(each.images for each in had)

    group = await episodes(world, engine).run(task, decode_partials(encode_task(task, had)))

    assert all(each.resumed_tokens for each in group.trajectories)
    for one, other in zip(group.trajectories, whole.trajectories, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.images == other.images
        assert one.loss_mask.tolist() == other.loss_mask.tolist()
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=TOLERANCE, rtol=0)
    check(group, world, [0])


async def test_an_environment_that_shows_another_picture_when_it_is_replayed_fails_the_group(
    world: World, engine: Engine
) -> None:
    class Restless(Gallery):
        made = 0

        def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
            type(self).made += 1
            return super().reset(seed)

        def step(self, text: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            self.turn += 1
            picture = a_picture("red" if self.made <= MEMBERS else "blue")
            return [{"type": "image", "image": picture}], 1.0, False, False, {}

    def converse(task: Task, member: int) -> Conversation:
        return EnvironmentConversation(Restless, task, 5.0, is_quick=True)

    first = episodes(world, engine, converse)
    running = asyncio.create_task(first.run(the_task()))
    await until_turn(engine, 1.5)
    await first.interrupt()
    had = (await running).trajectories

    with pytest.raises(Exception, match="shows something else"):
        await episodes(world, engine, converse).run(the_task(), had)


async def test_sampled_tokens_have_the_log_probs_of_transformers_own_forward(world: World, engine: Engine) -> None:
    group = await episodes(world, engine, at_a_vernissage, SHORT).run(replace(the_task(), group_size=24))
    model = AutoModelForImageTextToText.from_pretrained(world.folders[0]).eval()
    processor = ImageProcessor.from_directory(world.folders[0])
    checked = 0
    for each in group.trajectories:
        mask, ids = each.loss_mask.astype(bool), torch.from_numpy(each.token_ids.astype(np.int64))
        if IMAGE_TOKEN in ids[mask]:
            continue  # It would look for a picture there.
        shown = [processor.process(image.data) for image in each.images]
        with torch.no_grad():
            logits = model(input_ids=ids[None], **as_read(shown, ids)).logits[0]
        found = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[mask[1:], 0]
        torch.testing.assert_close(found, torch.from_numpy(each.log_probs)[mask], atol=TOLERANCE, rtol=0)
        checked += 1
    assert checked >= 3


def test_ids_of_appended_pieces_are_those_of_the_whole_conversation(world: World) -> None:
    renderer, generator = world.renderer, np.random.default_rng(0)

    def said(role: str, most: int) -> Message:
        sizes = [tuple(int(each) for each in generator.integers(8, 60, 2)) for _ in range(generator.integers(0, most))]
        images = tuple(a_picture(seed=int(generator.integers(99)), size=size) for size in sizes)
        words = " ".join(generator.choice(WORDS, 3))
        return Message(role, f"{words} " + f"{IMAGE_MARK} " * len(images) + words, images)

    for _ in range(100):
        chat = [said("user", 3)]
        ids, images = renderer.illustrated(chat)
        for _ in range(3):
            answer = said("assistant", 1)
            ids = (*ids, *renderer.token_ids(answer.content))
            asked = [said("user", 3)]
            added, more = renderer.illustrated_continuation(asked, ids[-1])
            images = (*images, *(replace(each, start=each.start + len(ids)) for each in more))
            ids, chat = (*ids, *added), [*chat, answer, *asked]
            assert (ids, images) == renderer.illustrated(chat)


@pytest.mark.parametrize(
    ("limits", "num_turns"), [({"max_images": 1}, 2), ({"max_tokens": 24}, 1)], ids=["too many pictures", "too long"]
)
async def test_a_picture_without_room_is_not_shown_at_all_and_ends_the_episode(
    world: World, engine: Engine, limits: dict[str, int], num_turns: int
) -> None:
    group = await episodes(world, engine, sampling=SHORT, **limits).run(the_task())

    for each in group.trajectories:
        assert each.finish_reason is FinishReason.TOKENS
        assert len(each.turns) == num_turns
        assert len(each.images) == num_turns - 1
        shown = each.token_ids[each.loss_mask == 0]
        assert (shown == IMAGE_TOKEN).sum() == sum(image.num_tokens for image in each.images)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([{"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}], "none is fetched"),
        ([{"type": "image", "image": b"nothing"}], "no image"),
        ([{"type": "image", "image": a_picture("red")}, {"type": "video"}], "must be text, image or image_url"),
    ],
)
async def test_what_cannot_be_shown_is_an_error_of_the_episode(
    world: World, engine: Engine, said: object, words: str
) -> None:
    class Odd(Gallery):
        def step(self, text: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return said, 1.0, False, False, {}

    def converse(task: Task, member: int) -> Conversation:
        return EnvironmentConversation(Odd, task, 5.0, is_quick=True)

    group = await episodes(world, engine, converse, SHORT).run(the_task())

    for each in group.trajectories:
        assert each.status is GradeStatus.ERROR
        assert words in (each.reason or "")


async def test_pictures_where_the_spec_has_none_are_an_error_of_the_episode(world: World, engine: Engine) -> None:
    blind = ChatRenderer.from_directory(str(world.folders[0]))
    turns = Turns(SHORT, SHORT)
    group = await MultiTurnEpisodes(engine, blind, turns, Limits(TURNS, CONTEXT), in_a_gallery, ResumeRule()).run(
        the_task()
    )

    assert {each.reason for each in group.trajectories} == {"there are images to be shown, and data.images is not set"}


@pytest.mark.parametrize(
    "model", [{}, {"vision_tower": "trained"}, {"vision_tower": "trained", "lora": {"rank": 2}}], ids=str
)
async def test_a_step_trains_on_pictures_of_later_turns(world: World, engine: Engine, model: dict[str, Any]) -> None:
    group = travelled(await episodes(world, engine).run(the_task()))
    learner = a_learner(world.folders[0], **model)
    before = {name: each.clone() for name, each in learner.loaded.model.named_parameters()}

    figures = learner.train([group], 1)

    moved = {name for name, each in learner.loaded.model.named_parameters() if not torch.equal(each, before[name])}
    assert any(map(is_of_tower, moved)) is bool(model)
    assert any("language_model" in name for name in moved)
    assert figures is not None


async def test_other_bounds_on_pixels_than_the_rollouts_are_refused(world: World, engine: Engine) -> None:
    group = travelled(await episodes(world, engine).run(the_task()))
    processor = ImageProcessor.from_directory(world.folders[0], max_pixels=256)

    with pytest.raises(DataError, match="bounds on pixels"):
        make_batch([group], processor=processor)


async def test_members_that_are_shown_the_same_picture_send_its_bytes_once(world: World, engine: Engine) -> None:
    group = await episodes(world, engine, at_a_vernissage, SHORT).run(the_task(a_picture(seed=1, size=(24, 16))))

    body = encode_body(group)

    for picture in (a_picture(seed=1, size=(24, 16)), drawn("", 0)):
        assert body.count(picture) == 1
    received = travelled(group)
    assert [each.images for each in received.trajectories] == [each.images for each in group.trajectories]
    assert len({id(each.images[1].data) for each in received.trajectories}) == 1


def an_agents_spec(folder: Path, images: dict[str, Any] | None) -> ExperimentSpec:
    return validate_spec(
        {
            "name": "agents",
            "model": {"path": str(folder)},
            "data": {"path": "unused.jsonl", "images": images},
            "rollout": {
                "group_size": 1,
                "sampling": {"max_new_tokens": 6},
                "engine": {"context_tokens": CONTEXT},
                "agents": {},
            },
            "algorithm": {"advantage": {"kind": "reinforce_plus_plus"}},
            "reward": {"components": [{"kind": "agent"}]},
            "optimisation": {"steps": 2, "groups_per_mini_batch": 2},
        }
    )


def an_agents_episode(world: World, engine: Engine, images: dict[str, Any] | None) -> Episode:
    return Episode(
        "e-1.rollout-1",
        the_task(a_picture(seed=9)),
        0,
        an_agents_spec(world.folders[0], images),
        engine,
        ChatTemplate(world.renderer),
        time.monotonic,
        on_death=lambda _: None,
        threads=Threads(),
    )


def sent(data: bytes, url: str | None = None) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url or uri_of(data)}}, {"type": "text", "text": " which ?"}]
    return {"role": "user", "content": parts}


async def test_pictures_that_an_agent_sends_in_later_turns_are_trained_where_they_were_seen(
    world: World, engine: Engine
) -> None:
    episode = an_agents_episode(world, engine, {"max_per_prompt": 4})
    chat: list[dict[str, Any]] = [{"role": "system", "content": "which"}]
    for number in range(3):
        chat.append(sent(a_picture(seed=number, size=(16 + 8 * number, 24))))
        chat.append(await ask(episode, *chat))
    # It goes on from the first reply once more, which is a branch that was shown one of the pictures.
    await ask(episode, *chat[:3], sent(a_picture("red")))

    first, branch = await episode.trajectories()

    assert [image.data for image in first.images] == [
        a_picture(seed=number, size=(16 + 8 * number, 24)) for number in range(3)
    ]
    assert [image.data for image in branch.images] == [first.images[0].data, a_picture("red")]
    assert len(first.turns) == 3
    check(Group(the_task(a_picture(seed=9)), (first, branch)), world, [0])


async def test_what_a_policy_wrote_is_text_where_an_agent_sends_it_beside_pictures(
    world: World, engine: Engine
) -> None:
    episode = an_agents_episode(world, engine, {"max_per_prompt": 4})
    said = {"role": "assistant", "content": QUOTED}
    chat = [sent(a_picture("red")), said, {"role": "user", "content": QUOTED}]
    reply = await ask(episode, *chat)
    following = sent(a_picture("blue"))
    following["content"].append({"type": "text", "text": QUOTED})
    await ask(episode, *chat, reply, following)

    (trajectory,) = await episode.trajectories()

    assert [image.data for image in trajectory.images] == [a_picture("red"), a_picture("blue")]
    shown = trajectory.token_ids[trajectory.loss_mask == 0]
    assert (shown == IMAGE_TOKEN).sum() == sum(image.num_tokens for image in trajectory.images)
    assert QUOTED in trajectory.turns[1].observation
    check(Group(the_task(a_picture("red")), (trajectory,)), world, [0])


@pytest.mark.parametrize(
    ("images", "message", "words"),
    [
        (None, sent(a_picture("red")), "the spec has no data.images"),
        ({"max_per_prompt": 1}, sent(a_picture("red")), "a prompt 1 at most"),
        ({}, sent(b"", "http://example.com/a.png"), "none is fetched"),
        ({}, {**sent(a_picture("red")), "role": "assistant"}, "must be text, or parts of type text$"),
    ],
)
async def test_pictures_of_agents_that_cannot_be_shown_are_refused(
    world: World, engine: Engine, images: dict[str, Any] | None, message: dict[str, Any], words: str
) -> None:
    episode = an_agents_episode(world, engine, images)

    with pytest.raises(InvalidRequest, match=words):
        await ask(episode, message, message)
