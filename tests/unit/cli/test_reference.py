"""An experiment is named by id, by the beginning of its id, or by name."""

import pytest

from flotilla.connection import choose_experiment
from flotilla.shared.errors import Conflict, NotFound
from flotilla.shared.schemas.experiment import ExperimentState, ExperimentView
from tests.unit.cli.test_progress import a_view

ENDED, RUNNING, DRAFT = ExperimentState.COMPLETED, ExperimentState.RUNNING, ExperimentState.DRAFT


def views(*named: tuple[str, ExperimentState]) -> list[ExperimentView]:
    """Oldest first."""
    return [a_view(id=id_, name=id_.rpartition("-")[0], state=state) for id_, state in named]


@pytest.mark.parametrize(
    ("reference", "meant"),
    [
        ("sum-bb22", "sum-bb22"),
        ("sum-bb", "sum-bb22"),
        ("sum", "sum-bb22"),
        ("product", "product-dd44"),
        ("pro", "product-dd44"),
        ("chess", "chess-ff66"),
        (None, "sum-bb22"),
    ],
)
def test_a_name_means_the_active_one_else_the_newest(reference: str | None, meant: str) -> None:
    known = views(
        ("sum-aa11", ENDED),
        ("sum-bb22", RUNNING),
        ("sum-cc33", ENDED),
        ("product-dd44", ENDED),
        ("chess-ee55", ENDED),
        ("chess-ff66", DRAFT),
    )

    assert choose_experiment(known, reference).id == meant


def test_without_an_active_one_the_newest_is_meant() -> None:
    assert choose_experiment(views(("sum-aa11", ENDED), ("product-bb22", ENDED)), None).id == "product-bb22"


@pytest.mark.parametrize("reference", ["sum", "sum-a", None])
def test_several_are_listed_with_whole_ids(reference: str | None) -> None:
    known = views(("sum-aa11", RUNNING), ("sum-ab22", RUNNING))

    with pytest.raises(Conflict, match=r"sum-aa11 \(running\), sum-ab22 \(running\)"):
        choose_experiment(known, reference)


def test_what_is_near_is_suggested() -> None:
    with pytest.raises(NotFound, match="no experiment 'arithmetik': did you mean arithmetic"):
        choose_experiment(views(("arithmetic-aa11", ENDED)), "arithmetik")


@pytest.mark.parametrize("reference", ["sum", None])
def test_where_there_is_none_that_is_said(reference: str | None) -> None:
    with pytest.raises(NotFound, match="there is no experiment; `flotilla start FILE` makes one"):
        choose_experiment([], reference)


def test_an_experiment_that_a_client_drives_is_meant_only_where_it_is_named() -> None:
    driven = a_view(id="s:train:0", name="s:train:0", kind="tinker", state=RUNNING)
    known = [*views(("sum-aa11", ENDED)), driven]

    assert choose_experiment(known, None).id == "sum-aa11"
    assert choose_experiment(known, "s:train:0") is driven
    assert driven.reached == str(driven.step)
