"""A trajectory of many turns is only appended to, and one turn of it is what a single turn is."""

from dataclasses import replace

import numpy as np
import pytest

from flotilla.services.rollout.trajectory_builder import RenderTally, TrajectoryBuilder
from flotilla.services.trainer.data.batch import pieces
from flotilla.shared.schemas.prompt_image import PromptImage
from flotilla.shared.schemas.routing import RoutedExperts
from flotilla.shared.schemas.trajectory import GradeStatus, Group, Trajectory
from flotilla.shared.schemas.turns import FinishReason, Turn
from flotilla.shared.streams.codec import decode_group, encode_body, encode_grades
from flotilla.shared.testing.builders import a_task, a_trajectory


def sampled(
    builder: TrajectoryBuilder, *tokens: int, version: int = 0, reason: FinishReason = FinishReason.STOP
) -> None:
    ids = np.array(tokens, np.int32)
    builder.sample(ids, -ids.astype(np.float32) / 10, ((0, version),), reason, text=" ".join(map(str, tokens)))


def three_turns(tally: RenderTally | None = None) -> TrajectoryBuilder:
    builder = TrajectoryBuilder(tally)
    builder.show([1, 2, 3])
    sampled(builder, 4, 5, version=6)
    builder.reward(0.5)
    builder.show([7], "seven", state=70)
    sampled(builder, 8, version=6)
    builder.show([9, 10], "nine ten")
    sampled(builder, 11, 12, version=7, reason=FinishReason.LENGTH)
    builder.reward(-1.0)
    return builder


def test_tokens_masks_versions_and_turns_are_where_they_were_made() -> None:
    made = three_turns().build(FinishReason.TURNS)

    assert made.token_ids.tolist() == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12]
    assert np.flatnonzero(made.loss_mask).tolist() == [3, 4, 6, 9, 10]
    assert made.log_probs.tolist() == pytest.approx([0, 0, 0, -0.4, -0.5, 0, -0.8, 0, 0, -1.1, -1.2])
    assert made.versions == ((0, 6), (9, 7))
    assert made.sampled_versions().tolist() == [6, 6, 6, 7, 7]
    assert made.turns == (
        Turn(0, 3, 5, FinishReason.STOP, "4 5", reward=0.5),
        Turn(5, 6, 7, FinishReason.STOP, "8", "seven", state=70),
        Turn(7, 9, 11, FinishReason.LENGTH, "11 12", "nine ten", reward=-1.0),
    )
    assert made.text == "11 12"
    assert made.finish_reason.is_truncation


def test_what_nobody_answered_is_left_out() -> None:
    builder = three_turns()
    builder.show([13, 14], "never answered")

    assert (
        builder.build(FinishReason.TURNS).token_ids.tolist()
        == three_turns().build(FinishReason.TURNS).token_ids.tolist()
    )


def test_a_completion_needs_something_that_was_shown() -> None:
    builder = three_turns()

    with pytest.raises(ValueError, match="shown before"):
        sampled(builder, 1)


def test_going_on_behind_a_turn_gives_the_same_trajectory() -> None:
    whole = three_turns().build(FinishReason.TURNS)

    builder = TrajectoryBuilder.continuing(whole, 2)
    builder.show([9, 10], "nine ten")
    sampled(builder, 11, 12, version=7, reason=FinishReason.LENGTH)
    builder.reward(-1.0)
    again = builder.build(FinishReason.TURNS)

    assert again.to_wire() == whole.to_wire()


def test_turns_survive_every_hop_and_a_grade() -> None:
    made = three_turns().build(FinishReason.TURNS)
    group = Group(a_task(group_size=1), (made.graded(GradeStatus.SCORED, 1.0),))

    (back,) = decode_group(encode_body(group), encode_grades(group)).trajectories

    assert back.turns == made.turns
    assert back.finish_reason is FinishReason.TURNS


def test_a_single_turn_is_on_the_wire_as_it_was_before_there_were_turns() -> None:
    single = a_trajectory()

    assert set(single.sampled_to_wire()) == {
        *("token_ids", "loss_mask", "log_probs", "versions", "finish_reason", "text", "resumed_tokens"),
    }
    assert Trajectory.from_wire(single.to_wire()).turns == ()


@pytest.mark.parametrize("cut", [Turn(0, 0, 11, FinishReason.STOP), Turn(0, 3, 10, FinishReason.STOP)])
def test_turns_that_do_not_cover_the_tokens_are_refused(cut: Turn) -> None:
    made = three_turns().build(FinishReason.TURNS)

    with pytest.raises(ValueError, match="turn"):
        replace(made, turns=(cut,))


def routed(builder: TrajectoryBuilder, number: int, *tokens: int) -> None:
    """Sample tokens with a record whose ids tell which pass they are of, for all tokens that it read."""
    ids = np.array(tokens, np.int32)
    read = len(builder.prompt_ids) + len(tokens) - 1
    record = RoutedExperts.of(np.tile([[[number, 0]]], (read, 1, 1)), 9)
    builder.sample(ids, np.zeros(len(ids), np.float32), ((0, 0),), FinishReason.STOP, "", record)


def test_each_token_has_the_experts_of_the_first_pass_that_read_it_for_a_sample() -> None:
    builder = TrajectoryBuilder()
    builder.show([1, 2, 3])
    routed(builder, 1, 4, 5)
    builder.show([6])
    routed(builder, 2, 7)
    builder.show([8, 9], is_fresh=True)
    routed(builder, 3, 10)
    builder.show([11])
    routed(builder, 4, 12)

    made = builder.build(FinishReason.TURNS)

    assert made.experts is not None
    # The last token of a prompt that another one follows was read by nobody.
    assert made.experts.ids()[:, 0, 0].tolist() == [1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4]
    assert [each.experts.num_tokens for each in pieces(made) if each.experts] == [6, 4]
    again = TrajectoryBuilder.continuing(made, 2)
    again.show([8, 9], is_fresh=True)
    routed(again, 5, 10)
    found = again.build(FinishReason.STOP)
    assert found.experts is not None
    assert found.experts.ids()[:, 0, 0].tolist() == [1, 1, 1, 1, 2, 2, 2, 5, 5]


def test_a_turn_without_a_record_leaves_none() -> None:
    builder = TrajectoryBuilder()
    builder.show([1, 2, 3])
    routed(builder, 1, 4, 5)
    builder.show([6])
    sampled(builder, 7)

    assert builder.build(FinishReason.STOP).experts is None


def test_an_interrupted_turn_without_a_record_is_left_out_and_known_turns_keep_theirs() -> None:
    builder = TrajectoryBuilder()
    builder.show([1, 2, 3])
    routed(builder, 1, 4, 5)
    builder.show([8, 9], is_fresh=True)
    builder.sample(np.array([10], np.int32), np.zeros(1, np.float32), ((0, 0),), FinishReason.ABORTED)

    left = builder.build(FinishReason.ABORTED)

    assert (len(left.turns), left.num_sampled) == (1, 2)
    assert left.experts is not None
    again = TrajectoryBuilder.continuing(left, 1)
    again.show([8, 9], is_fresh=True)
    routed(again, 2, 11)
    found = again.build(FinishReason.STOP).experts
    assert found is not None
    assert found.ids()[:, 0, 0].tolist() == [1, 1, 1, 1, 1, 2, 2]


def with_images() -> TrajectoryBuilder:
    builder = TrajectoryBuilder()
    builder.show([1, 2, 2, 3], images=[PromptImage(1, 2, b"task's")])
    sampled(builder, 4)
    builder.show([7, 2, 2], images=[PromptImage(1, 2, b"shown")])
    sampled(builder, 8)
    builder.show([1, 2, 2, 3, 4, 2], is_fresh=True, images=[PromptImage(1, 2, b"task's"), PromptImage(5, 1, b"new")])
    return builder


def test_images_are_listed_once_there_are_others_than_the_tasks_in_its_first_prompt() -> None:
    builder = with_images()

    assert builder.prompt_images == (PromptImage(1, 2, b"task's"), PromptImage(5, 1, b"new"))
    shown = (PromptImage(1, 2, b"task's"), PromptImage(6, 2, b"shown"))
    assert builder.build(FinishReason.TURNS, [b"task's"]).images == shown, "what nobody answered is left out"
    sampled(builder, 5)
    made = builder.build(FinishReason.TURNS, [b"task's"])
    assert made.images == (*shown, PromptImage(10, 2, b"task's"), PromptImage(14, 1, b"new"))
    assert [each.images for each in pieces(made)] == [shown, builder.prompt_images]
    one_turn = TrajectoryBuilder.continuing(made, 1)
    assert one_turn.images == shown[:1]
    assert one_turn.build(FinishReason.STOP, [b"task's"]).images == ()
    assert one_turn.build(FinishReason.STOP, [b"other"]).images == shown[:1]
    assert TrajectoryBuilder.continuing(replace(made, images=()), 1, first_images=shown).images == shown[:1]


@pytest.mark.parametrize("images", [(PromptImage(2, 2, b""), PromptImage(3, 1, b"")), (PromptImage(9, 9, b""),)])
def test_images_that_overlap_or_have_no_tokens_are_no_trajectory(images: tuple[PromptImage, ...]) -> None:
    with pytest.raises(ValueError, match="has no place"):
        replace(three_turns().build(FinishReason.TURNS), images=images)
