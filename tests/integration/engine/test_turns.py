"""A next turn computes only what is new of its conversation, and samples what it would have sampled otherwise."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from flotilla.services.rollout.engines.base import Completion
from flotilla.services.rollout.engines.decoders.native import kernels
from flotilla.services.rollout.engines.embedded.engine import TorchEngine
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from tests.contract.engine.models import VOCAB, make_model, save_image, scores
from tests.contract.engine.requests import a_request
from tests.integration.engine.conftest import SavedModel
from tests.integration.engine.running import answer, steps

Saved = Callable[[str], SavedModel]
OPENING = tuple(range(10, 31))
TURNS = 3
NEW_TOKENS = 9
SHOWN = 5
WHOLE = sum(len(OPENING) + turn * (NEW_TOKENS + SHOWN) for turn in range(TURNS))
"""Tokens of all prompts of a conversation."""


def shown(turn: int) -> list[int]:
    """Say what follows a turn."""
    return np.random.default_rng(turn).integers(2, VOCAB, SHOWN).tolist()


def talk(engine: TorchEngine, opening: Sequence[int] = OPENING, seed: int = 1) -> list[tuple[list[int], Completion]]:
    """Have a conversation: the prompt and the completion of each turn."""
    prompt, turns = list(opening), []
    for turn in range(TURNS):
        request = a_request(prompt, seeds=(seed + turn,), max_new_tokens=NEW_TOKENS, is_turn=True)
        [completion] = answer(engine, request)
        turns.append((prompt, completion))
        prompt = [*prompt, *completion.token_ids.tolist(), *shown(turn)]
    return turns


@pytest.fixture(params=["native", "torch"])
def computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have the fused forward computed by the native kernels, or by torch's operators."""
    if request.param == "torch":
        monkeypatch.setattr(kernels, "_kernels", lambda: None)
    elif kernels._kernels() is None:
        pytest.skip("no C compiler")
    return str(request.param)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama-gqa-tied"])
def test_a_conversation_is_the_same_with_and_without_what_was_kept(saved: Saved, family: str, computed_by: str) -> None:
    keeping, forgetting = saved(family).engine(), saved(family).engine(prefix_cache_mb=0)

    kept, computed = talk(keeping), talk(forgetting)

    for (prompt, one), (_, other) in zip(kept, computed, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        # Torch's products of other shapes add in another order.
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=3e-6 if computed_by == "torch" else 0, rtol=0)
        expected = scores(saved(family).model, prompt, one.token_ids)
        np.testing.assert_allclose(one.log_probs, expected, atol=1e-5, rtol=0)
        assert one.versions == ((0, 0),)
    load = keeping.load()
    # Of each later turn only the last sampled token, whose KV nobody had needed, and what was shown behind it.
    assert load.prefilled_tokens == len(OPENING) + (TURNS - 1) * (1 + SHOWN)
    assert load.reused_tokens + load.prefilled_tokens == forgetting.load().prefilled_tokens == WHOLE
    assert (load.reuses, forgetting.load().reuses) == (TURNS - 1, 0)


@pytest.mark.usefixtures("computed_by")
def test_members_of_a_group_that_ask_for_themselves_share_their_prompt(saved: Saved) -> None:
    engine = saved("qwen3").engine()
    requests = [a_request(OPENING, seeds=(seed,), is_turn=True) for seed in range(4)]

    for request in requests:
        engine.submit(request)
    answers = steps(engine)

    assert engine.load().prefilled_tokens == len(OPENING)
    for request in requests:
        [completion], [alone] = answers[request.request_id], answer(saved("qwen3").engine(), request)
        np.testing.assert_allclose(completion.log_probs, alone.log_probs, atol=3e-6, rtol=0)


@pytest.mark.usefixtures("computed_by")
def test_a_group_goes_on_from_one_turn(saved: Saved) -> None:
    engine = saved("qwen3").engine()
    [(_, _), (prompt, completion), _] = talk(engine)
    longer = [*prompt, *completion.token_ids.tolist(), *shown(1)]

    group = answer(engine, a_request(longer, seeds=(5, 6, 7), is_turn=True))

    for member in group:
        expected = scores(saved("qwen3").model, longer, member.token_ids)
        np.testing.assert_allclose(member.log_probs, expected, atol=1e-5, rtol=0)
    assert engine.load().reuses == TURNS


def test_a_single_turn_keeps_nothing(saved: Saved) -> None:
    engine = saved("qwen3").engine()
    [completion] = answer(engine, a_request(OPENING))

    answer(engine, a_request([*OPENING, *completion.token_ids.tolist(), 7]))

    assert engine.load().reused_tokens == 0


@pytest.mark.usefixtures("computed_by")
@pytest.mark.parametrize("mode", OnWeightUpdate)
def test_new_weights_use_nothing_that_the_old_ones_computed(saved: Saved, tmp_path: Path, mode: OnWeightUpdate) -> None:
    engine, new = saved("qwen3").engine(), make_model("qwen3", seed=1)
    in_flight = a_request(OPENING, max_new_tokens=NEW_TOKENS, is_turn=True)
    engine.submit(in_flight)
    answers = steps(engine, 3)
    engine.request_update(1, save_image(new, tmp_path / "new.safetensors"), 5, mode)
    [first] = (answers | steps(engine))[in_flight.request_id]
    prompt = [*OPENING, *first.token_ids.tolist(), *shown(0)]

    [second] = answer(engine, a_request(prompt, max_new_tokens=NEW_TOKENS, is_turn=True))

    assert second.versions == ((0, 5),)
    np.testing.assert_allclose(second.log_probs, scores(new, prompt, second.token_ids), atol=1e-5, rtol=0)
    # Interrupted samples go on with KV of the new version alone, which may be used again.
    kept = len(OPENING) + NEW_TOKENS - 1 if mode is OnWeightUpdate.INTERRUPT else 0
    assert engine.load().reused_tokens == kept


def test_what_is_kept_is_bounded_and_gone_while_the_engine_sleeps(saved: Saved) -> None:
    engine = saved("qwen3").engine(context_tokens=128, prefix_cache_mb=1)
    for number in range(60):
        talk(engine, generator_tokens(number), seed=number)

    assert 0 < engine._turns.num_bytes <= 10**6
    engine.sleep()
    assert engine._turns.num_bytes == 0


def generator_tokens(number: int) -> list[int]:
    """Make the opening of another conversation."""
    opening: list[int] = np.random.default_rng(number).integers(2, VOCAB, 60).tolist()
    return opening


def test_batch_invariance_holds_over_turns_to_the_last_bit(saved: Saved, computed_by: str) -> None:
    alone, crowded = (saved("qwen3").engine(batch_invariant=True) for _ in range(2))
    for number in range(5):
        crowded.submit(a_request(generator_tokens(number), max_new_tokens=50))

    for (_, one), (_, other) in zip(talk(alone), talk(crowded), strict=True):
        assert one.log_probs.tobytes() == other.log_probs.tobytes()
    # Other shapes give other bits where torch computes, so nothing is kept there.
    assert alone.load().reuses == (TURNS - 1 if computed_by == "native" else 0)
