"""Newer weights of one adapter, while it and others are sampled with in the same batch of the embedded engine."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flotilla.services.rollout.engines.base import Completion, GenerationRequest
from flotilla.services.rollout.engines.embedded.engine import TorchEngine
from flotilla.services.rollout.engines.embedded.outcomes import Generated, GenerationFailed, Updated
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import Unavailable, WeightTransferFailed
from tests.contract.engine.models import scores
from tests.contract.engine.requests import a_request
from tests.integration.engine.conftest import SavedModel
from tests.integration.engine.running import answer, outcomes, steps, update_errors
from tests.integration.engine.test_adapters import SCALE, adapted

pytestmark = pytest.mark.skipif(not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="no C compiler")

Saved = Callable[[str], SavedModel]
PROMPT = tuple(range(10, 21))
TOKENS = 30


def asked(name: str, seed: int = 1, **fields: object) -> GenerationRequest:
    return a_request(PROMPT, seeds=(seed,), max_new_tokens=TOKENS, adapter=name, **fields)  # type: ignore[arg-type]


def same(one: Completion, other: Completion) -> bool:
    is_same = np.array_equal(one.token_ids, other.token_ids) and np.array_equal(one.log_probs, other.log_probs)
    return is_same and one.versions == other.versions


class Trained:
    """Two versions of an adapter of rank 4, and one of rank 8 of another experiment."""

    def __init__(self, saved: Saved, directory: Path) -> None:
        self.model = saved("qwen3")
        self.old, self.older = adapted("qwen3", self.model.path, directory, seed=1, rank=4)
        self.new, self.newer = adapted("qwen3", self.model.path, directory, seed=2, rank=4)
        _, self.theirs = adapted("qwen3", self.model.path, directory, seed=3, rank=8)

    def engine(self, *, slots: int = 8) -> TorchEngine:
        engine = self.model.engine(slots=slots)
        engine.load_adapter("mine", self.older, SCALE, 1)
        engine.load_adapter("theirs", self.theirs, SCALE, 7)
        return engine

    def update(self, engine: TorchEngine, mode: OnWeightUpdate, update_id: int = 5) -> None:
        engine.request_adapter(update_id, "mine", self.newer, SCALE, 2, mode)


@pytest.fixture
def trained(saved: Saved, tmp_path: Path) -> Trained:
    return Trained(saved, tmp_path)


@pytest.mark.parametrize("mode", list(OnWeightUpdate))
def test_samples_of_the_other_are_to_the_bit_what_they_are_without_an_update(
    trained: Trained, mode: OnWeightUpdate
) -> None:
    engine, theirs = trained.engine(), asked("theirs")
    engine.submit(theirs)
    engine.submit(asked("mine"))
    steps(engine, 9)
    trained.update(engine, mode)
    found = steps(engine)

    [alone] = answer(trained.engine(), asked("theirs"))
    assert same(found[theirs.request_id][0], alone)
    assert alone.versions == ((0, 7),)


def test_an_interrupted_sample_goes_on_as_if_the_newer_weights_had_read_it_all(trained: Trained) -> None:
    engine, mine = trained.engine(), asked("mine")
    engine.submit(mine)
    steps(engine, 9)
    trained.update(engine, OnWeightUpdate.INTERRUPT)
    [found] = steps(engine)[mine.request_id]

    [(_, first), (start, second)] = found.versions
    assert (first, start, second) == (1, 10, 2)  # the first step gives two tokens
    before, behind = (scores(each, PROMPT, found.token_ids) for each in (trained.old, trained.new))
    np.testing.assert_allclose(found.log_probs[:start], before[:start], atol=1e-4, rtol=0)
    np.testing.assert_allclose(found.log_probs[start:], behind[start:], atol=1e-4, rtol=0)


def test_drained_samples_end_first_and_what_waits_begins_under_the_newer_weights(trained: Trained) -> None:
    engine, running, waiting, theirs = trained.engine(), asked("mine"), asked("mine", 2), asked("theirs")
    engine.submit(running)
    steps(engine, 3)
    trained.update(engine, OnWeightUpdate.DRAIN)
    engine.submit(waiting)
    engine.submit(theirs)
    found = outcomes(engine)

    done = [each.request_id if isinstance(each, Generated) else each.update_id for each in found]  # type: ignore[union-attr]
    assert done[:2] == [running.request_id, 5]
    versions = {each.request_id: each.completions[0].versions for each in found if isinstance(each, Generated)}
    expected = {running.request_id: ((0, 1),), waiting.request_id: ((0, 2),), theirs.request_id: ((0, 7),)}
    assert versions == expected


def test_an_evaluation_keeps_its_weights_and_the_others_go_on_beside_it(trained: Trained) -> None:
    engine, held, theirs = trained.engine(), asked("mine", holds_weights=True), asked("theirs")
    engine.submit(held)
    steps(engine, 3)
    trained.update(engine, OnWeightUpdate.CONTINUE)
    engine.submit(theirs)
    found = outcomes(engine)

    versions = {each.request_id: each.completions[0].versions for each in found if isinstance(each, Generated)}
    assert versions == {held.request_id: ((0, 1),), theirs.request_id: ((0, 7),)}
    assert [type(each) for each in found][:2] == [Generated, Updated]


def test_an_adapter_that_gives_no_numbers_fails_its_samples_by_its_own_version(trained: Trained) -> None:
    engine = trained.engine()
    engine.load_adapter("broken", trained.older, float("nan"), 4)
    engine.submit(asked("broken"))
    theirs = asked("theirs")
    engine.submit(theirs)
    found = outcomes(engine)

    [error] = [each.error for each in found if isinstance(each, GenerationFailed)]
    assert "under policy version 4" in error.detail
    assert [each.request_id for each in found if isinstance(each, Generated)] == [theirs.request_id]


def test_an_adapter_that_adds_nothing_samples_as_the_base_does_to_the_bit(trained: Trained) -> None:
    engine = trained.engine()
    engine.request_adapter(1, "new", None, 1.0, 0, OnWeightUpdate.CONTINUE)
    assert update_errors(outcomes(engine)) == [None]
    [found] = answer(engine, asked("new"))

    [base] = answer(trained.model.engine(slots=8), a_request(PROMPT, seeds=(1,), max_new_tokens=TOKENS))
    assert same(found, base)


def test_a_file_that_is_no_adapter_is_refused_and_the_one_before_stays(trained: Trained, tmp_path: Path) -> None:
    engine = trained.engine()
    engine.request_adapter(1, "mine", tmp_path / "none", SCALE, 2, OnWeightUpdate.DRAIN)
    [error] = update_errors(outcomes(engine))

    assert isinstance(error, WeightTransferFailed)
    assert answer(engine, asked("mine"))[0].versions == ((0, 1),)


def test_an_engine_that_is_put_to_sleep_answers_the_updates_that_wait(trained: Trained) -> None:
    engine = trained.engine()
    engine.submit(asked("mine"))
    steps(engine, 2)
    trained.update(engine, OnWeightUpdate.DRAIN)
    engine.sleep()

    assert [type(each) for each in update_errors(outcomes(engine))] == [Unavailable]


def test_a_forgotten_update_is_not_made(trained: Trained) -> None:
    engine = trained.engine()
    trained.update(engine, OnWeightUpdate.DRAIN)
    engine.cancel_update(5)

    assert not update_errors(outcomes(engine))
    assert answer(engine, asked("mine"))[0].versions == ((0, 1),)


def test_each_adapter_has_its_part_of_the_load(trained: Trained) -> None:
    engine = trained.engine(slots=2)
    answer(engine, asked("theirs"))
    engine.submit(asked("mine"))
    engine.submit(asked("mine", 2))
    engine.submit(asked("mine", 3))
    steps(engine, 4)

    mine, theirs, whole = engine.load("mine"), engine.load("theirs"), engine.load()
    assert (mine.version, mine.running, mine.waiting, mine.generated_tokens) == (1, 2, 1, 10)
    assert (theirs.version, theirs.running, theirs.waiting, theirs.generated_tokens) == (7, 0, 0, TOKENS)
    assert whole.generated_tokens == mine.generated_tokens + theirs.generated_tokens
    assert whole.prefilled_tokens == mine.prefilled_tokens + theirs.prefilled_tokens
    assert mine.cpu_seconds + theirs.cpu_seconds == pytest.approx(whole.cpu_seconds, rel=0.1)


def test_what_is_computed_again_for_an_adapter_is_its_own(trained: Trained) -> None:
    engine = trained.engine()
    engine.submit(asked("mine"))
    steps(engine, 4)
    before = engine.load("mine").prefilled_tokens
    trained.update(engine, OnWeightUpdate.INTERRUPT)
    steps(engine, 1)

    assert engine.load("mine").prefilled_tokens > before
    assert engine.load().prefilled_tokens == engine.load("mine").prefilled_tokens


def test_of_a_dropped_adapter_nothing_is_kept_but_the_sums(trained: Trained) -> None:
    engine = trained.engine()
    answer(engine, asked("mine"))
    whole = engine.load()
    engine.drop_adapter("mine")

    assert (engine.load().generated_tokens, engine.load().prefilled_tokens) == (
        whole.generated_tokens,
        whole.prefilled_tokens,
    )
    assert "mine" not in engine._batch.ended_tokens
    assert "mine" not in engine._adapters.shares.prefilled
