"""verl's ``val_only`` becomes an evaluation of the held-out problems."""

from typing import Any

from flotilla.importers.build import Imported
from flotilla.importers.parameter import Verdict
from tests.unit.importers.sources import BASES, import_flat

KWARGS = "actor_rollout_ref.rollout.val_kwargs"


def imported(**changes: Any) -> Imported:
    return import_flat("verl", {**BASES["verl"], "trainer.val_only": True, **changes})


def test_a_run_that_only_validates_answers_the_held_out_problems_once() -> None:
    found = imported(**{f"{KWARGS}.do_sample": True, f"{KWARGS}.temperature": 0.6, f"{KWARGS}.n": 4,
                        "actor_rollout_ref.actor.optim.lr": 1e-5, "trainer.test_freq": 5})  # fmt: skip

    assert found.may_run(), found.report.render()
    assert found.spec is not None and not found.spec.trains
    evaluation = found.document["evaluation"]
    assert (evaluation["path"], evaluation["temperature"], evaluation["group_size"]) == ("heldout.parquet", 0.6, 4)
    assert evaluation.get("every_versions") is None
    assert found.document["reward"]["components"]
    assert {"optimisation", "algorithm", "checkpoint"}.isdisjoint(found.document)
    verdicts = {each.name: each.verdict for each in found.report.entries}
    assert verdicts["actor_rollout_ref.actor.optim.lr"] is Verdict.IGNORED
    assert verdicts["trainer.val_only"] is Verdict.TRANSLATED


def test_no_number_of_steps_is_asked_for() -> None:
    assert imported(**{"trainer.total_training_steps": None}).may_run()


def test_without_held_out_problems_it_is_refused() -> None:
    assert "trainer.val_only" in [each.name for each in imported(**{"data.val_files": None}).report.refused]
