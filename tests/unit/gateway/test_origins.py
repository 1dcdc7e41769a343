"""Which checkpoint a new experiment begins from, and how that becomes its own."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.lifecycle import origins
from flotilla.services.gateway.lifecycle.origins import (
    UNFINISHED,
    as_decided,
    check_spec,
    find,
    parse_reference,
    remove_unfinished,
    take,
)
from flotilla.services.trainer.checkpoint.manager import check_same_lineage
from flotilla.shared.checkpoints.folders import complete
from flotilla.shared.config.load.spec_text import with_changes
from flotilla.shared.errors import InvalidSpec, ModelError, Unavailable
from tests.unit.gateway.builders import a_spec
from tests.unit.gateway.stored import store_checkpoint


def a_longer_spec(**changes: Any) -> Any:
    return a_spec(optimisation={"steps": 9, "groups_per_mini_batch": 2}, **changes)


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """An experiment with checkpoints of steps 2 and 4."""
    directory = tmp_path / "runs" / "trial" / "fleet" / "experiments" / "trial-1"
    for step in (2, 4):
        store_checkpoint(directory, step, a_longer_spec().model_dump(mode="json"))
    return directory


@pytest.mark.parametrize(
    ("text", "expected"),
    [("trial-1", ("trial-1", None)), ("trial-1@40", ("trial-1", 40)), ("/a@b/c", ("/a@b/c", None))],
)
def test_a_reference_is_a_place_and_perhaps_a_step(text: str, expected: tuple[str, int | None]) -> None:
    assert parse_reference(text) == expected


@pytest.mark.parametrize("below", ["", "checkpoints", "checkpoints/step-00000004", "../../..", "../../../../trial"])
def test_a_path_is_a_checkpoints_an_experiments_or_a_runs_folder(parent: Path, below: str) -> None:
    assert find((parent / below).resolve(), None).path == parent / "checkpoints" / "step-00000004"


def test_a_damaged_checkpoint_gives_way_to_the_one_before_unless_it_was_named(parent: Path) -> None:
    (parent / "checkpoints/step-00000004/optimizer.safetensors").write_text("moments of step 5")

    assert find(parent, None).step == 2
    with pytest.raises(ModelError, match=r"is damaged: optimizer\.safetensors"):
        find(parent, 4)


def test_whole_weights_do_not_begin_from_adapters_and_the_way_is_named(parent: Path) -> None:
    adapters = a_longer_spec(model={"path": "/model", "lora": {"rank": 8}})
    store_checkpoint(parent, 6, adapters.model_dump(mode="json"))
    stored = find(parent, 6)

    check_spec(stored, adapters)
    with pytest.raises(
        ModelError, match=r"model\.lora: .* says null: .* what flotilla export .*step-00000006 DIRECTORY"
    ):
        check_spec(stored, a_longer_spec(model={"path": "/model"}))


def test_adapters_of_a_release_that_knew_fewer_settings_go_on_and_packed_weights_beside_them_do_not(
    parent: Path,
) -> None:
    def adapters(**lora: Any) -> Any:
        return a_longer_spec(model={"path": "/model", "lora": {"rank": 8, "targets": ["q_proj"], **lora}})

    document = adapters().model_dump(mode="json")
    del document["model"]["lora"]["quantisation"]
    store_checkpoint(parent, 6, document)
    stored = find(parent, 6)

    check_spec(stored, adapters())
    check_same_lineage(stored.state, adapters())
    for check in (lambda spec: check_spec(stored, spec), lambda spec: check_same_lineage(stored.state, spec)):
        with pytest.raises(ModelError, match=r"model\.lora.*quantisation.*nf4"):
            check(adapters(quantisation={"dtype": "nf4"}))


def test_what_is_not_there_is_refused_with_what_is(parent: Path) -> None:
    with pytest.raises(ModelError, match=r"step 3 in .*steps that are there: 2, 4"):
        find(parent, 3)
    with pytest.raises(ModelError, match="no checkpoint of ours"):
        find(parent.parents[4] / "elsewhere", None)
    with pytest.raises(InvalidSpec, match="absolute"):
        find(Path("runs/trial"), None)
    shutil.copytree(parent, parent.with_name("trial-2"))
    with pytest.raises(ModelError, match="several experiments"):
        find(parent.parents[2], None)


def test_a_spec_that_does_not_go_with_the_checkpoint_is_refused(parent: Path) -> None:
    stored = find(parent, None)

    check_spec(stored, a_longer_spec())
    with pytest.raises(InvalidSpec, match="contains 4 steps already, got 4"):
        check_spec(stored, a_spec(optimisation={"steps": 4}))
    with pytest.raises(ModelError, match=r"model\.path"):
        check_spec(stored, a_longer_spec(model={"path": "/another"}))
    with pytest.raises(ModelError, match=r"no critic\.safetensors"):
        check_spec(stored, a_longer_spec(algorithm={"advantage": {"kind": "gae"}}))


def test_of_a_checkpoint_only_what_is_wanted_is_taken(parent: Path, tmp_path: Path) -> None:
    begins = {"resume_from": str(parent), "load_contents": ["model"]}
    spec = a_longer_spec(checkpoint=begins)

    take(find(parent, None), spec, "fork-1", tmp_path / "fork-1")

    (own,) = complete(tmp_path / "fork-1" / "checkpoints")
    assert "optimizer.safetensors" not in own.state.files
    assert own.state.files.keys() == own.state.checksums.keys() > set()
    assert not (own.path / "optimizer.safetensors").exists()
    with pytest.raises(ModelError, match=r"no optimizer\.safetensors, .*load_contents to \[model, extra\]"):
        check_spec(own, a_longer_spec())
    check_spec(own, spec)


def test_what_is_left_open_is_what_it_was_decided_to_be(tmp_path: Path) -> None:
    directory = tmp_path / "trial-1"
    decided = a_longer_spec(model={"path": a_spec().model.path, "dtype": "bfloat16"})
    store_checkpoint(directory, 2, decided.model_dump(mode="json"))
    stored, left_open = find(directory, None), a_longer_spec()
    assert left_open.model.dtype == "auto"

    spec = as_decided(stored, left_open)

    assert spec.model.dtype == "bfloat16"
    check_spec(stored, spec)
    with pytest.raises(ModelError, match=r"model\.dtype"):
        said = a_longer_spec(model={"path": a_spec().model.path, "dtype": "float32"})
        check_spec(stored, as_decided(stored, said))


def test_the_checkpoint_becomes_the_new_experiments_own(parent: Path, tmp_path: Path) -> None:
    spec, directory = a_longer_spec(seed=3), tmp_path / "fork-1"

    origin = take(find(parent, None), spec, "fork-1", directory)
    shutil.rmtree(parent)

    (own,) = complete(directory / "checkpoints")
    assert (own.state.experiment_id, own.state.spec["seed"], own.step) == ("fork-1", 3, 4)
    assert find(directory, None).step == 4, "every file has its checksum"
    assert (origin.experiment_id, origin.step, origin.version, origin.first_group_id) == ("trial-1", 4, 4, 8)


@pytest.mark.parametrize("is_vanishing", [True, False], ids=["vanishes", "disk-is-full"])
def test_what_cannot_be_taken_is_refused_and_leaves_nothing(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_vanishing: bool
) -> None:
    stored, real = find(parent, 4), origins._link

    def link(source: Any, target: Path) -> None:
        real(source, target)
        if is_vanishing:
            shutil.rmtree(stored.path)
        elif target.name == "optimizer.safetensors":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(origins, "_link", link)
    error: type[Exception] = ModelError if is_vanishing else Unavailable
    with pytest.raises(error, match="vanished while it was taken" if is_vanishing else "No space left"):
        take(stored, a_longer_spec(), "fork-1", tmp_path / "fork-1")

    assert not (tmp_path / "fork-1").exists()


def test_what_a_crash_left_without_a_record_is_removed_and_what_has_one_is_finished(
    parent: Path, tmp_path: Path
) -> None:
    for name in ("stored-1", "lost-1"):
        take(find(parent, None), a_longer_spec(), name, tmp_path / "experiments" / name)

    remove_unfinished(tmp_path / "experiments", {"stored-1"}.__contains__)

    assert [path.name for path in (tmp_path / "experiments").iterdir()] == ["stored-1"]
    assert not (tmp_path / "experiments" / "stored-1" / UNFINISHED).exists()


def test_a_fork_with_another_coefficient_begins_with_it_and_others_where_the_controller_was(tmp_path: Path) -> None:
    kl = {"placement": "loss", "coefficient": 0.1}
    parent = tmp_path / "kl-1"
    store_checkpoint(parent, 2, a_longer_spec(algorithm={"kl": kl}).model_dump(mode="json"), kl_coefficient=0.17)

    for name, coefficient in (("same", 0.1), ("other", 0.4)):
        spec = a_longer_spec(algorithm={"kl": kl | {"coefficient": coefficient}})
        take(find(parent, None), spec, name, tmp_path / name)

    found = [next(iter(complete(tmp_path / name / "checkpoints"))).state.kl_coefficient for name in ("same", "other")]
    assert found == [0.17, 0.4]


@pytest.mark.parametrize(
    ("change", "moments"),
    [
        ({}, (8, 0.5, 0.25)),
        ({"reward": {"components": [{"kind": "exact", "correct": 2.0}]}}, None),
        ({"algorithm": {"advantage": {"kind": "grpo"}}}, None),
        ({"reward": {"max_consecutive_failures": 5}}, (8, 0.5, 0.25)),
    ],
)
def test_a_fork_with_other_rewards_or_another_estimator_forgets_those_of_its_parent(
    tmp_path: Path, change: dict[str, Any], moments: tuple[int, float, float] | None
) -> None:
    advantage = {"kind": "reinforce", "baseline": "batch_mean", "compared_with": "run"}
    spec = a_longer_spec(algorithm={"advantage": advantage})
    parent = tmp_path / "run-1"
    store_checkpoint(parent, 2, spec.model_dump(mode="json"), reward_moments=(8, 0.5, 0.25))

    take(find(parent, None), with_changes(spec, change), "fork", tmp_path / "fork")

    assert next(iter(complete(tmp_path / "fork" / "checkpoints"))).state.reward_moments == moments
