"""Whether the engine's context holds the longest prompt and its answer, and what is said where it does not."""

from typing import Any

import pytest

from flotilla.services.gateway.preflight.prompts import Prompts, why_no_room
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec


def a_spec(context: int, sampled: int, **data: Any) -> ExperimentSpec:
    return validate_spec(
        {
            "name": "trial",
            "model": {"path": "/model"},
            "data": {"path": "/train.jsonl"} | data,
            "rollout": {"sampling": {"max_new_tokens": sampled}, "engine": {"context_tokens": context}},
            "reward": {"components": [{"kind": "numeric"}]},
            "optimisation": {"steps": 3},
        }
    )


def prompts(longest: int, spec: ExperimentSpec, own: int | None = None) -> Prompts:
    return Prompts(9, 5, longest, spec.max_prompt_tokens, 0, "the tokenizer's chat template", "p", own)


@pytest.mark.parametrize(("longest", "own"), [(1000, None), (1000, 1024), (1000, 4096)])
def test_what_fits_is_not_spoken_of(longest: int, own: int | None) -> None:
    spec = a_spec(2048, 24)

    assert why_no_room(spec, prompts(longest, spec, own)) is None


@pytest.mark.parametrize(
    ("longest", "sampled", "own", "said"),
    [
        (
            1600,
            512,
            None,
            "a prompt of 1600 tokens and 512 new ones (rollout.sampling.max_new_tokens) make 2112, more than the 2048 "
            "of rollout.engine.context_tokens:",
        ),
        (
            900,
            512,
            1024,
            "a prompt of 900 tokens and 512 new ones (rollout.sampling.max_new_tokens) make 1412, more than the 1024 "
            "that the model can hold (max_position_embeddings in its config.json; the 2048 of "
            "rollout.engine.context_tokens "
            "are cut):",
        ),
        (
            5,
            1024,
            1024,
            "rollout.sampling.max_new_tokens 1024 leaves no room for a prompt in the 1024 that the model can",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_its_keys_and_its_cause(
    longest: int, sampled: int, own: int | None, said: str
) -> None:
    spec = a_spec(2048, sampled)

    assert (why_no_room(spec, prompts(longest, spec, own)) or "").startswith(said)


@pytest.mark.parametrize("overlong", [{"kind": "filter"}, {"kind": "truncate", "side": "left"}])
def test_prompts_that_are_left_out_or_cut_take_no_more_room_than_they_may(overlong: dict[str, str]) -> None:
    spec = a_spec(2048, 512, overlong=overlong)

    assert why_no_room(spec, prompts(1600, spec)) is None
    assert "a prompt of 1536 tokens" in (why_no_room(spec, prompts(1600, spec, own=1024)) or "")
