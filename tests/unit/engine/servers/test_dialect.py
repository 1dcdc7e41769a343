"""Labels of versions at a server are of one engine alone."""

import pytest

from flotilla.services.rollout.engines.servers.dialect import VersionLabels, VersionLost, label_in


def test_a_label_is_read_by_the_engine_that_made_it_and_by_no_other() -> None:
    mine, others = VersionLabels(), VersionLabels()

    assert [mine.version(mine.of(version)) for version in (0, 7, 1000)] == [0, 7, 1000]
    with pytest.raises(VersionLost):
        others.version(mine.of(7))


@pytest.mark.parametrize("label", ["default", "7", "", "-", None, 7])
def test_what_somebody_else_calls_weights_is_no_version(label: object) -> None:
    with pytest.raises(VersionLost, match="labelled"):
        VersionLabels().version(label)


@pytest.mark.parametrize("number", ["", "07", "+7", "-7", " 7", "7.0", "default"])
def test_a_version_is_written_in_one_way(number: str) -> None:
    labels = VersionLabels()

    with pytest.raises(VersionLost):
        labels.version(labels.of(7).replace("7", number, 1))


def test_an_answer_without_a_label_has_none() -> None:
    assert [label_in(each) for each in ({"weight_version": "7"}, {}, None, "<html>", [])] == [
        "7",
        None,
        None,
        None,
        None,
    ]
