"""Finding samples: filtered, ordered and paged, from files that come, change and go."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flotilla.shared.config.sections.tracking import SamplesConfig
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.samples import index as index_module
from flotilla.shared.samples.folder import SampleFolder, ended_name, evaluation_name
from flotilla.shared.samples.index import DATABASE, SampleIndex
from flotilla.shared.samples.query import SampleOrder, SampleQuery
from flotilla.shared.samples.reading import read_page
from flotilla.shared.schemas.sample_kinds import KeptGroup, SampleFile, SampleKind
from flotilla.shared.schemas.samples import SamplePage
from flotilla.shared.schemas.trajectory import GradeStatus
from flotilla.shared.testing.builders import a_group, a_trajectory
from tests.unit.samples.builders import a_step


def write(directory: Path, *files: SampleFile) -> None:
    """Write files, one second after another."""
    folder = SampleFolder(directory, SamplesConfig())
    for number, file in enumerate(files):
        folder.write(file)
        os.utime(folder.path / file.name, (1000 + number, 1000 + number))


def page(index: SampleIndex, *, limit: int = 100, after: str | None = None, **query: Any) -> SamplePage:
    return read(index, limit=limit, after=after, **query)


def read(
    index: SampleIndex,
    *,
    limit: int = 9,
    after: str | None = None,
    with_tokens: bool = False,
    seconds: float = 10,
    **query: Any,
) -> SamplePage:
    found = read_page(
        index, SampleQuery(**query), limit=limit, after=after, with_tokens=with_tokens, seconds=seconds
    ).plain()
    page = SamplePage.model_validate(found)
    assert page.model_dump(mode="json") == found, "it is as plain as what is sent"
    return page


def named(found: SamplePage) -> list[tuple[int | None, int, float | None]]:
    return [(each.step, each.group_id, each.reward) for each in found.items]


def a_record(directory: Path) -> SampleIndex:
    """Two steps, an evaluation after the first, and groups that ended otherwise."""
    failed = a_group(7, version=1)
    broken = a_trajectory().graded(GradeStatus.ERROR, None, reason="the grader is gone")
    ended: Sequence[KeptGroup] = [
        KeptGroup(a_group(6, rewards=[0.5, 0.5], version=1), SampleKind.FILTERED, "zero_spread"),
        KeptGroup(replace(failed, trajectories=(broken, broken)), SampleKind.FAILED, "grading_error"),
    ]
    evaluated = [KeptGroup(a_group(0, rewards=[0.75]), SampleKind.EVALUATION)]
    write(
        directory,
        a_step(1, first=0, rewards=(1.0, 0.0)),
        SampleFile(evaluation_name(1), evaluated, 1, 1),
        a_step(2, first=2, rewards=(0.9, -1.0)),
        SampleFile(ended_name(1, "reward", 1), ended, None, 1),
    )
    return SampleIndex(directory)


def test_the_newest_come_first_in_the_order_of_their_step(tmp_path: Path) -> None:
    found = page(a_record(tmp_path), kinds=(SampleKind.TRAINED,))

    assert named(found) == [
        (2, 2, 0.9),
        (2, 2, -1.0),
        (2, 3, 0.9),
        (2, 3, -1.0),
        (1, 0, 1.0),
        (1, 0, 0.0),
        (1, 1, 1.0),
        (1, 1, 0.0),
    ]
    first = found.items[0]
    assert (first.id, first.lag, first.advantage) == ("step-00000002/0/0", 0, 1.0)
    assert (first.prompt, first.completion, first.label) == ("What is 2 plus 1?", "an answer", "3")
    assert (found.num_files, found.num_unread, found.next) == (4, 0, None)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"order": SampleOrder.WORST, "step": 2}, [(2, 2, -1.0), (2, 3, -1.0), (2, 2, 0.9), (2, 3, 0.9)]),
        ({"order": SampleOrder.BEST, "max_reward": 0.8, "min_reward": 0.1}, [(1, 0, 0.75), *[(None, 6, 0.5)] * 2]),
        ({"step": 1, "kinds": (SampleKind.EVALUATION,)}, [(1, 0, 0.75)]),
        ({"is_failure": True}, [(None, 7, None), (None, 7, None)]),
        ({"row": 3}, [(2, 3, 0.9), (2, 3, -1.0)]),
        ({"group": 6}, [(None, 6, 0.5), (None, 6, 0.5)]),
        ({"min_reward": 0.95}, [(1, 0, 1.0), (1, 1, 1.0)]),
        ({"status": GradeStatus.ERROR}, [(None, 7, None), (None, 7, None)]),
        ({"step": 99}, []),
    ],
)  # fmt: skip
def test_a_query_finds_what_it_asks_for(tmp_path: Path, query: dict[str, Any], expected: list[Any]) -> None:
    assert named(page(a_record(tmp_path), **query)) == expected


def test_pages_follow_each_other_whatever_is_written_meanwhile(tmp_path: Path) -> None:
    index = a_record(tmp_path)
    whole = named(page(index))

    first = page(index, limit=5)
    write(tmp_path, *(a_step(step) for step in range(1, 5)))
    os.utime(tmp_path / "samples" / "step-00000001.parquet", (1000, 1000))
    os.utime(tmp_path / "samples" / "step-00000002.parquet", (1002, 1002))
    for step in (3, 4):
        os.utime(tmp_path / "samples" / f"step-{step:08d}.parquet", (9000, 9000))
    second = page(index, limit=100, after=first.next)

    assert len(named(first) + named(second)) == len(whole)
    assert {each.step for each in second.items} <= {None, 1, 2}
    with pytest.raises(InvalidRequest, match="cursor"):
        page(index, after="x")


def test_a_file_that_changed_or_went_is_seen(tmp_path: Path) -> None:
    index = a_record(tmp_path)
    page(index)

    write(tmp_path, a_step(1, first=50))
    (tmp_path / "samples" / "step-00000002.parquet").unlink()

    assert {each.group_id for each in page(index, kinds=(SampleKind.TRAINED,)).items} == {50, 51}
    assert {each.group_id for each in page(SampleIndex(tmp_path), kinds=(SampleKind.TRAINED,)).items} == {50, 51}


def test_many_new_files_are_read_newest_first_and_a_step_that_is_asked_for_at_once(tmp_path: Path) -> None:
    write(tmp_path, *(a_step(step, num_groups=1) for step in range(1, 6)))
    index = SampleIndex(tmp_path)

    found = read(index, step=2, seconds=0)
    newest = read(index, seconds=0)

    assert [each.step for each in found.items] == [2, 2]
    assert (found.num_files, found.num_unread) == (5, 4)
    assert [each.step for each in newest.items] == [5, 5, 2, 2]


def test_what_is_no_file_of_samples_costs_no_other(tmp_path: Path) -> None:
    index = a_record(tmp_path)
    (tmp_path / "samples" / "step-00000003.parquet").write_bytes(b"PAR1 cut off")
    (tmp_path / "samples" / "notes.txt").write_text("mine")

    assert len(page(index).items) == 13
    assert page(index).num_unread == 0


def test_a_broken_or_older_index_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = a_record(tmp_path)
    expected = named(page(index))
    index.close()

    monkeypatch.setattr(index_module, "LAYOUT", index_module.LAYOUT + 1)
    assert named(page(SampleIndex(tmp_path))) == expected
    for path in (tmp_path / "samples").glob(f"{DATABASE}*"):
        path.write_bytes(b"no database" * 1000)
    assert named(page(SampleIndex(tmp_path))) == expected


def test_an_experiment_without_samples_has_none(tmp_path: Path) -> None:
    assert page(SampleIndex(tmp_path)).items == ()
    assert page(SampleIndex(tmp_path / "never")).items == ()


def test_an_index_that_was_asked_before_there_was_anything_is_kept_on_disk_then(tmp_path: Path) -> None:
    index = SampleIndex(tmp_path)
    page(index)
    write(tmp_path, a_step(1))

    assert len(page(index).items) == 4
    assert (tmp_path / "samples" / DATABASE).exists()


def test_tokens_come_with_null_for_what_has_no_value(tmp_path: Path) -> None:
    index = a_record(tmp_path)

    [first, *_] = read(index, step=2, limit=1, with_tokens=True).items

    assert first.tokens is not None
    assert first.tokens["advantages"] == [None] * 3 + [1.0] * 5
    assert len(first.tokens["token_ids"]) == 8
    assert first.tokens["ref_log_probs"] is None
    first.model_dump_json()


@pytest.mark.parametrize("name", ["step", "row", "group"])
def test_a_number_that_no_index_holds_is_refused(name: str) -> None:
    asked: dict[str, Any] = {name: 2**63 - 1}
    SampleQuery(**asked)

    for number in (2**63, 10**30, -(10**30)):
        with pytest.raises(InvalidRequest, match=f"{name}: at most"):
            SampleQuery(**(asked | {name: number}))


@pytest.mark.parametrize(
    "after", ["", "1", "-1", "1-", "\u00b2-1", "1-\u00b2", "9999999999999-0", "1-" + "9" * 30, "9" * 5000 + "-1"]
)
def test_what_is_no_cursor_is_refused(tmp_path: Path, after: str) -> None:
    index = SampleIndex(tmp_path)

    with pytest.raises(InvalidRequest, match="is not a cursor"):
        read_page(index, SampleQuery(), limit=1, after=after, with_tokens=False, seconds=1)
