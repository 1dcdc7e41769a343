"""How many tokens a pass may have is said by memory, written down, and halved where it was too many."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flotilla.services.trainer.algorithms.log_probs import TokenStatistics
from flotilla.services.trainer.data.batch import make_batch
from flotilla.services.trainer.data.packing import ModelInput
from flotilla.services.trainer.learning import pass_sizes
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.learning.pass_sizes import HALVED, Bound, PassSizes
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.services.trainer.models.memory import measured_peak
from flotilla.services.trainer.parallel.ranks import ONE_RANK, Ranks
from tests.unit.trainer.builders import a_group, a_model, a_spec, uneven_groups

GIB = 1 << 30
CPU = torch.device("cpu")


def a_learner(**optimisation: Any) -> Learner:
    settings = {"steps": 5, "groups_per_mini_batch": 2, "learning_rate": 1e-2, "packing": "padded"}
    spec = a_spec(
        optimisation=settings | optimisation,
        algorithm={"old_log_probs": "recompute"},
        asynchrony={"require_batches": 2},
    )
    return Learner(spec, LoadedModel(a_model(), Path()))


def weights_of(learner: Learner) -> torch.Tensor:
    return learner.weights.copies(as_published=False)["float32"]


def with_room_for(learner: Learner, positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every pass of more positions fail as on a GPU, after it has left a part of its gradient."""
    compute = learner.policy.statistics

    def limited(inputs: ModelInput, **options: Any) -> TokenStatistics:
        if inputs.token_ids.numel() > positions:
            if torch.is_grad_enabled():
                next(learner.policy.model.parameters()).grad = torch.ones_like(next(learner.policy.model.parameters()))
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return compute(inputs, **options)

    monkeypatch.setattr(learner.policy, "statistics", limited)


def test_the_peak_of_some_work_is_measured() -> None:
    with measured_peak(CPU) as peak:
        torch.ones(64 << 20, dtype=torch.uint8).max()

    assert peak.num_bytes is None or 48 << 20 < peak.num_bytes < 200 << 20


def test_the_bound_is_estimated_then_measured_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = a_learner()
    learner.sizes.keep(tmp_path)
    free = [64 * GIB]
    monkeypatch.setattr(pass_sizes, "free_bytes", lambda _: free[0])

    for step in (1, 2, 3):
        learner.train(uneven_groups(), step)
        free[0] //= 2

    found = json.loads((tmp_path / pass_sizes.RECORD).read_text())
    assert [(each["step"], each["why"]) for each in found] == [(1, "estimated"), (2, "measured")]
    assert [each["tokens"] for each in found] == [8192, 8192], "more are not faster on a CPU"


def test_less_memory_makes_smaller_passes_and_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    small, plain = a_learner(), a_learner(micro_batch_tokens=256)
    per_token = small.sizes._need.per_token
    needed = small.sizes._need.gradients * 3 + small.sizes._need.fixed
    monkeypatch.setattr(pass_sizes, "free_bytes", lambda _: 2 * (needed + 300 * per_token))

    small.train(uneven_groups(), 1)
    plain.train(uneven_groups(), 1)

    assert [each.tokens for each in small.sizes.bounds] == [256]
    assert torch.equal(weights_of(small), weights_of(plain))


def test_who_goes_on_cuts_as_was_cut_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = a_learner(), a_learner()
    first.sizes.keep(tmp_path)
    with_room_for(first, 300, monkeypatch)
    first.train(uneven_groups(), 1)
    second.sizes.keep(tmp_path)
    monkeypatch.setattr(pass_sizes, "free_bytes", lambda _: 0)

    second.train(uneven_groups(), 1)

    assert HALVED in [each.why for each in second.sizes.bounds]
    assert torch.equal(weights_of(first), weights_of(second))


@pytest.mark.parametrize("setting", ["auto", 8192])
def test_a_pass_that_does_not_fit_is_repeated_in_halves(
    setting: int | str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limited, whole = a_learner(micro_batch_tokens=setting), a_learner(micro_batch_tokens=8192)
    with_room_for(limited, 300, monkeypatch)

    with caplog.at_level(logging.WARNING):
        losses = limited.train(uneven_groups(), 1).metrics
    expected = whole.train(uneven_groups(), 1).metrics

    assert min(each.tokens for each in limited.sizes.bounds) == 256
    assert 0 < len([record for record in caplog.records if "half as many" in record.message]) < 8
    assert losses["loss/policy"] == pytest.approx(expected["loss/policy"], abs=1e-5)
    torch.testing.assert_close(weights_of(limited), weights_of(whole), atol=1e-5, rtol=0)


def test_a_single_sequence_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = a_learner()
    with_room_for(learner, 3, monkeypatch)

    with pytest.raises(torch.OutOfMemoryError):
        learner.train([a_group([0.0, 1.0], number) for number in range(4)], 1)


def test_what_did_not_fit_once_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = a_learner()
    with_room_for(learner, 300, monkeypatch)

    learner.train(uneven_groups(), 1)
    learner.train(uneven_groups(), 2)

    assert [each.tokens for each in learner.sizes.bounds if each.step == 2] == [256]


class Others(Ranks):
    """A job whose other ranks say what a test wants; nothing else of it is used."""

    def gather(self, payload: bytes) -> list[bytes]:
        return [payload, b"512", b"1024"]

    @property
    def is_several(self) -> bool:
        return True


def test_all_ranks_take_the_smallest_bound() -> None:
    spec = a_spec(parallelism={"ranks": 3})
    sizes = PassSizes(spec, Others(size=3), replace(a_learner().sizes._need))

    sizes.begin(1)

    assert [each.tokens for each in sizes.bounds] == [512]


def test_a_rank_whose_pass_does_not_fit_leaves_the_smaller_bound_for_the_next_job(tmp_path: Path) -> None:
    spec = a_spec(parallelism={"ranks": 3})
    need = a_learner().sizes._need
    rank = PassSizes(spec, Others(size=3), need)
    rank.follow([Bound(1, 0, 8192, "estimated")], tmp_path / pass_sizes.RECORD)
    batch_learner = a_learner()
    batch = make_batch(uneven_groups())

    def fails(_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    rank.begin(4)
    with pytest.raises(torch.OutOfMemoryError):
        rank.fit(batch_learner._cut_of(batch, range(batch.num_sequences)), fails)

    after = PassSizes(spec, ONE_RANK, need)
    after.keep(tmp_path)
    assert after.bounds[-1] == Bound(4, 0, 4096, HALVED)
