"""The report writes what was made of a parameter as a spec has it."""

import pytest

from flotilla.importers.datasets import held_out
from tests.unit.importers.sources import BASES, import_flat


def test_values_are_written_as_in_a_spec() -> None:
    files = ["~/gsm8k/train.parquet", "~/math/train.parquet"]
    given = {**BASES["verl"], "data.train_files": files, "actor_rollout_ref.model.enable_gradient_checkpointing": True}

    said = import_flat("verl", given).report.render()

    assert "-> data.path = null\n" in said
    assert '-> data.sources = [{"path": "~/gsm8k/train.parquet"}, {"path": "' in said
    assert "-> optimisation.activation_checkpointing = true\n" in said


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["~/gsm8k/test.parquet", "~/math/test.parquet"], ["gsm8k-test", "math-test"]),
        (["a/x.parquet", "b/y.parquet"], ["x", "y"]),
        (["x.parquet", "x.parquet"], ["x", "x-2"]),
    ],
)
def test_held_out_files_of_one_name_are_told_apart_by_their_folders(paths: list[str], names: list[str]) -> None:
    sets = held_out([{"path": path} for path in paths])["evaluation.sets"]

    assert [each["name"] for each in sets] == names
