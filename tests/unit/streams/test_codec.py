import time
from collections.abc import Callable
from dataclasses import replace

import msgpack
import numpy as np
import pytest

from flotilla.shared.schemas.prompt_image import PromptImage
from flotilla.shared.schemas.task import TASK_SCHEMA
from flotilla.shared.schemas.trajectory import GROUP_SCHEMA, ILLUSTRATED_SCHEMA, GradeStatus, Group
from flotilla.shared.streams.codec import (
    EntryHeader,
    decode_group,
    decode_partials,
    decode_task,
    encode_body,
    encode_fresh_header,
    encode_grades,
    encode_task,
    graded_header,
    group_header,
    task_header,
)
from flotilla.shared.testing.builders import a_group, a_task, a_trajectory, graded


def test_a_task_comes_back_equal() -> None:
    task = a_task(7, metadata={"nested": {"a": [1, None, 2.5]}, 3: "odd key"}, pinned_version=4, greedy=True)

    assert decode_task(encode_task(task)) == task


def test_a_group_comes_back_bit_for_bit() -> None:
    group = a_group(a_task(3), rewards=[None, 0.25])
    sent = group.trajectories[0]

    got = decode_group(encode_body(group), encode_grades(group))

    assert got.task == group.task
    received = got.trajectories[0]
    for name, dtype in (("token_ids", np.int32), ("loss_mask", np.uint8), ("log_probs", np.float32)):
        np.testing.assert_array_equal(getattr(received, name), getattr(sent, name))
        assert getattr(received, name).dtype == dtype
        assert not getattr(received, name).flags.writeable
    assert received.versions == sent.versions
    assert (got.trajectories[1].status, got.trajectories[1].reward) == (GradeStatus.SCORED, 0.25)
    assert (received.status, received.reward) == (GradeStatus.PENDING, None)


@pytest.mark.parametrize(
    ("decode", "known"),
    [(decode_task, TASK_SCHEMA), (lambda payload: decode_group(payload, b""), GROUP_SCHEMA)],
    ids=["task", "group"],
)
def test_a_payload_of_another_schema_is_refused_with_both_numbers(
    decode: Callable[[bytes], object], known: int
) -> None:
    payload = msgpack.packb({"schema": 99})

    with pytest.raises(ValueError, match=rf"schema 99.*{known}"):
        decode(payload)
    with pytest.raises(ValueError, match="mapping"):
        decode(msgpack.packb([1]))


def test_grades_of_another_number_are_refused() -> None:
    group = a_group(3)

    with pytest.raises(ValueError, match="0 grades do not go with 2 trajectories"):
        decode_group(encode_body(group), b"")


def test_a_group_of_views_is_encoded_as_its_values() -> None:
    whole = a_trajectory(sampled_tokens=20)
    strided = replace(
        whole,
        token_ids=np.repeat(whole.token_ids.astype(np.int64), 2)[::2],
        log_probs=whole.log_probs.astype(np.float64),
        loss_mask=whole.loss_mask.astype(bool),
    )

    assert strided.to_wire() == whole.to_wire()


def test_a_header_of_other_grades_is_the_header_of_the_group_that_bears_them() -> None:
    sampled = a_group(a_task(5, group_size=3), version=4)
    judged = graded(sampled, [0.0, 1.0, 1.0])

    header = graded_header(judged, group_header(sampled))

    assert replace(header, created_at=1.0) == group_header(judged, created_at=1.0)


def test_a_header_says_what_the_payload_holds() -> None:
    group = a_group(a_task(5, group_size=4), rewards=[0.0, 1.0, 1.0, None])

    header = group_header(group, created_at=12.5)

    assert header.reward_mean == pytest.approx(2 / 3)
    assert header.reward_spread == pytest.approx(np.std([0.0, 1.0, 1.0]))
    assert (header.group_id, header.size, header.token_count) == (5, 4, group.num_sampled)
    assert header.created_at == 12.5
    assert EntryHeader.from_bytes(header.to_bytes()) == header


def test_a_header_spans_the_versions_that_sampled() -> None:
    task = a_task(0, group_size=1, min_version=1)
    mixed = a_trajectory(prompt_tokens=2, sampled_tokens=4, versions=((0, 6), (3, 7), (5, 9)))

    header = group_header(Group(task, (mixed,)))

    assert (header.oldest_version, header.newest_version) == (6, 9)


@pytest.mark.parametrize("versions", [(3, 5), (5, 3), (4, 4)])
def test_a_header_agrees_with_the_tokens_about_versions(versions: tuple[int, int]) -> None:
    task = a_task(0, min_version=2)
    first, second = (a_trajectory(version=version) for version in versions)
    unsampled = a_trajectory(version=9, sampled_tokens=0)
    handed_over = a_trajectory(prompt_tokens=2, sampled_tokens=4, versions=((0, 1), (2, 6), (4, 8)))

    for trajectories in ((first, second), (first, unsampled), (unsampled,), (first, handed_over), (handed_over,)):
        header = group_header(Group(task, trajectories))
        sampled = np.concatenate([each.sampled_versions() for each in trajectories])
        expected = (sampled.min(), sampled.max()) if sampled.size else (2, 2)
        assert (header.oldest_version, header.newest_version) == expected


def test_a_fresh_task_has_the_header_that_any_task_has() -> None:
    task = a_task(2, min_version=3, group_size=4)

    header = EntryHeader.from_bytes(encode_fresh_header(task))

    assert header == task_header(task, created_at=header.created_at)
    assert abs(header.created_at - time.time()) < 60


def test_a_task_header_bears_no_reward() -> None:
    header = task_header(a_task(2, min_version=3), created_at=1.0)

    assert header == EntryHeader(TASK_SCHEMA, 2, 2, 0, 3, 3, None, None, 1.0)


def test_unknown_header_fields_are_passed_over_and_missing_ones_named() -> None:
    wire = msgpack.unpackb(task_header(a_task(), created_at=1.0).to_bytes())

    assert EntryHeader.from_bytes(msgpack.packb(wire | {"newer": 1})).group_id == 0
    del wire["size"]
    with pytest.raises(ValueError, match="size"):
        EntryHeader.from_bytes(msgpack.packb(wire))


def an_illustrated_group() -> Group:
    """Make a group whose members were shown the task's picture, one of their own and one that both saw."""
    task = a_task(3, images=(b"the task's picture",))
    members = [
        replace(
            each,
            images=(
                PromptImage(0, 1, b"the task's picture"),
                PromptImage(1, 1, b"a picture of both"),
                PromptImage(2, 1, b"picture of member %d" % number),
            ),
        )
        for number, each in enumerate(a_group(task, rewards=[None, 0.25]).trajectories)
    ]
    return Group(task, tuple(members))


def test_pictures_of_later_turns_travel_once_each_and_come_back() -> None:
    group = an_illustrated_group()

    body, task = encode_body(group), encode_task(group.task, group.trajectories)

    for payload in (body, task):
        assert [payload.count(each) for each in (b"the task's", b"of both", b"member 0", b"member 1")] == [1, 1, 1, 1]
    expected = [each.images for each in group.trajectories]
    assert [each.images for each in decode_group(body, encode_grades(group)).trajectories] == expected
    assert [each.images for each in decode_partials(task) if each is not None] == expected
    assert decode_task(task) == group.task
    assert msgpack.unpackb(body)["schema"] == ILLUSTRATED_SCHEMA, "an earlier release would read them as text"
    assert msgpack.unpackb(encode_body(a_group(3)))["schema"] == GROUP_SCHEMA
