from typing import Any

import numpy as np

from flotilla.services.rollout.episodes.special_tokens import SamplingTally, SpecialTokens

BOS, TURN, END = 1, 2, 3
SPECIAL = SpecialTokens(frozenset({BOS, TURN, END}), (BOS,), frozenset({END}), {BOS: "<s>", TURN: "<turn>"}.__getitem__)


class LlamaLike:
    """Begins every text with a token of its own."""

    all_special_ids = (BOS, TURN, END)

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [BOS, *range(10, 10 + len(text))]}

    def decode(self, ids: list[int]) -> str:
        return {BOS: "<s>"}[ids[0]]


def completion(*ids: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
    return np.array(ids, dtype=np.int32)


def test_a_tokenizer_says_what_begins_its_texts() -> None:
    special = SpecialTokens.of(LlamaLike(), (END,))

    assert (special.start, special.stops, special.name(BOS)) == ((BOS,), {END}, "<s>")


def test_doubled_and_missing_tokens_of_prompts_are_counted() -> None:
    tally = SamplingTally(SPECIAL)
    tally.add_prompt((BOS, BOS, 20, 20))
    tally.add_prompt((20, 21, TURN))
    tally.add_prompt((BOS, 20, TURN))

    report = tally.report()

    assert (report.prompts, report.doubled_special, report.without_start) == (3, 1, 1)
    assert report.special_token == "<s>"


def test_completions_that_go_on_after_a_special_token_are_counted() -> None:
    tally = SamplingTally(SPECIAL)
    tally.add_completion(completion(20, TURN, 21))
    tally.add_completion(completion(20, 21, TURN))
    tally.add_completion(completion(20, END))
    tally.add_completion(completion())

    report = tally.report()

    assert (report.completions, report.past_special, report.special_token) == (4, 1, "<turn>")


def test_nothing_is_found_where_nothing_is_known() -> None:
    tally = SamplingTally()
    tally.add_prompt((20, 20))
    tally.add_completion(completion(20, 20))

    report = tally.report()

    assert (report.doubled_special, report.without_start, report.past_special) == (0, 0, 0)
