"""Rows of the batch: joining, leaving, moving, versions and stops, without a model."""

import numpy as np
import pytest
import torch

from flotilla.services.rollout.engines.embedded.batch import ActiveRequest, Batch
from flotilla.services.rollout.engines.stop_text import StopText
from flotilla.shared.schemas.trajectory import FinishReason
from tests.contract.engine.requests import a_request


class Letters:
    """Decodes 0, 1, 2 ... as a, b, c ..."""

    def decode(self, token_ids: list[int], /) -> str:
        return "".join(chr(ord("a") + token_id) for token_id in token_ids)


def active(
    num_seeds: int, *, stop_ids: tuple[int, ...] = (), stop: tuple[str, ...] = (), **request: int
) -> ActiveRequest:
    stop_text = StopText(Letters(), stop) if stop else None
    owner = ActiveRequest(a_request(seeds=range(num_seeds), **request), stop_ids, stop_text)
    owner.completions = [None] * num_seeds
    return owner


def a_batch(num_slots: int = 8) -> Batch:
    return Batch(num_slots, context_tokens=64, vocab_size=26, device=torch.device("cpu"))


def record(batch: Batch, *token_ids: int) -> list[int]:
    values = np.arange(len(token_ids), dtype=np.float32)
    return batch.record(np.arange(batch.num_rows), np.array(token_ids), -values).tolist()


def test_rows_end_by_length_and_by_each_of_their_own_stop_tokens() -> None:
    batch = a_batch()
    batch.join(np.array([0, 1]), active(2, stop_ids=(7, 9), max_new_tokens=3), version=0)
    batch.join(np.array([2]), active(1, max_new_tokens=2), version=0)

    assert record(batch, 1, 9, 9) == [1]
    assert record(batch, 7, 1, 1) == [0, 2]


def test_a_finished_row_gives_its_completion_and_is_free() -> None:
    batch, owner = a_batch(), active(2, max_new_tokens=2, stop_ids=(4,))
    batch.join(batch.free_rows(2), owner, version=3)
    record(batch, 1, 2)
    ended = batch.record(np.arange(2), np.array([4, 5]), np.array([-1.0, -2.0], dtype=np.float32))

    [finished] = batch.leave_finished(ended)

    assert finished is owner
    assert [c.token_ids.tolist() for c in owner.completions if c] == [[1, 4], [2, 5]]
    assert [c.finish_reason for c in owner.completions if c] == [FinishReason.STOP, FinishReason.LENGTH]
    assert (batch.num_running, batch.num_rows, batch.free_rows(9).tolist()) == (0, 0, list(range(8)))


def test_a_stop_string_is_found_across_tokens() -> None:
    batch = a_batch()
    batch.join(np.array([0]), active(1, stop=("bc", "zz"), max_new_tokens=9), version=0)

    assert record(batch, 1) == []
    assert record(batch, 3) == []
    assert record(batch, 1) == []
    assert record(batch, 2) == [0]


def test_versions_are_tagged_where_they_begin() -> None:
    batch, owner = a_batch(), active(1, max_new_tokens=4)
    batch.join(np.array([0]), owner, version=1)
    batch.tag(2)  # before the first token: version 1 sampled nothing
    record(batch, 5)
    record(batch, 5)
    batch.tag(3)
    batch.tag(4)  # 3 sampled nothing either
    record(batch, 5)
    batch.leave(np.array([0]), [FinishReason.ABORTED])

    assert owner.completions[0] is not None
    assert owner.completions[0].versions == ((0, 2), (2, 4))


def test_a_version_that_sampled_nothing_leaves_no_trace_at_the_end() -> None:
    batch, owner = a_batch(), active(1, max_new_tokens=4)
    batch.join(np.array([0]), owner, version=1)
    record(batch, 5)
    batch.tag(2)
    batch.leave(np.array([0]), [FinishReason.ABORTED])

    assert owner.completions[0] is not None
    assert owner.completions[0].versions == ((0, 1),)


def test_moved_samples_keep_all_that_is_theirs() -> None:
    batch = a_batch()
    leaving, staying = active(3), active(2, stop_ids=(6,), top_k=3, temperature=0.5, max_new_tokens=9)
    batch.join(np.array([0, 1, 2]), leaving, version=0)
    batch.join(np.array([3, 4]), staying, version=0)
    record(batch, 1, 2, 3, 4, 5)
    before = batch.draws(np.array([3, 4])).tolist()
    batch.leave(np.array([0, 1, 2]), [FinishReason.ABORTED] * 3)

    sources, targets = batch.compaction()
    batch.move(sources, targets)

    assert (sources.tolist(), targets.tolist(), batch.num_rows) == ([3, 4], [0, 1], 2)
    assert batch.draws(np.array([0, 1])).tolist() == before
    assert batch.cached_tokens(0).tolist() == [5, 6, 7]
    sampling = batch.sampling_of(np.arange(2))
    assert sampling.temperatures is not None and sampling.temperatures.tolist() == [0.5, 0.5]
    assert sampling.top_k is not None and sampling.top_k.tolist() == [3, 3]
    assert record(batch, 6, 1) == [0]
    batch.leave(np.array([0, 1]), [FinishReason.STOP, FinishReason.ABORTED])
    assert [c.token_ids.tolist() for c in staying.completions if c] == [[4, 6], [5, 1]]


def test_rows_without_a_sample_ask_for_nothing() -> None:
    batch = a_batch()
    batch.join(np.array([0, 1]), active(2, top_k=2, top_p=0.5, temperature=2.0), version=0)
    batch.join(np.array([2]), active(1), version=0)
    batch.leave(np.array([0, 1]), [FinishReason.ABORTED] * 2)

    sampling = batch.sampling_of(np.arange(3))

    assert (sampling.temperatures, sampling.filtered, sampling.greedy) == (None, None, None)
    assert record(batch, 3, 3, 3) == []
    assert batch.lengths.tolist()[:3] == [0, 0, 3]


def test_penalties_follow_their_rows_and_leave_nothing_behind() -> None:
    batch = a_batch()
    batch.join(np.array([0]), active(1), version=0)
    batch.join(np.array([1, 2]), active(2, presence_penalty=0.5, min_p=0.1), version=0)
    record(batch, 8, 8, 9)
    batch.leave(np.array([0, 1]), [FinishReason.ABORTED] * 2)
    batch.move(*batch.compaction())

    sampling = batch.sampling_of(np.arange(1))

    assert sampling.min_p is not None and sampling.min_p.tolist() == [pytest.approx(0.1)]
    assert batch.needs_last_tokens and sampling.penalties is not None
    penalised = sampling.penalties.applied(torch.zeros(1, 26))
    assert {token: value for token, value in enumerate(penalised[0].tolist()) if value} == {9: -0.5}
    batch.leave(np.array([0]), [FinishReason.ABORTED])
    batch.join(np.array([0]), active(1), version=0)
    plain = batch.sampling_of(np.arange(1))
    assert plain.is_plain and not batch.needs_last_tokens


def test_requests_with_broken_log_probs_are_found() -> None:
    batch = a_batch()
    good, bad = active(1), active(2)
    batch.join(np.array([0]), good, version=0)
    batch.join(np.array([1, 2]), bad, version=0)

    batch.record(np.arange(3), np.array([1, 1, 1]), np.array([-1, np.nan, -1], dtype=np.float32))

    assert batch.broken() == [bad]


@pytest.mark.parametrize(
    ("text", "stop", "ends"), [("abcabd", "abd", True), ("abdc", "abd", True), ("abab", "abd", False)]
)
def test_stop_strings(text: str, stop: str, ends: bool) -> None:
    token_ids = np.array([ord(letter) - ord("a") for letter in text], dtype=np.int32)

    assert StopText(Letters(), [stop]).ends(token_ids) is ends


def test_what_is_known_about_sampling_follows_the_rows() -> None:
    batch = a_batch()
    batch.join(np.array([0]), active(1), version=0)
    assert batch.sampling().temperatures is None

    batch.join(np.array([1]), active(1, temperature=2.0), version=0)

    with_both = batch.sampling().temperatures
    assert with_both is not None and with_both.tolist() == [1.0, 2.0]
    batch.leave(np.array([1]), [FinishReason.ABORTED])
    assert batch.sampling().temperatures is None
