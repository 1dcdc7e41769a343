"""The engine records the experts that computed each token: those under which the token behind it was sampled."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from flotilla.services.rollout.engines.base import Completion, GenerationRequest, Prefix, ResumeRule
from flotilla.services.rollout.engines.process.engine import ProcessEngine
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import ModelError
from flotilla.shared.schemas.routing import RoutedExperts, RoutingSizes
from tests.contract.engine.models import save_model
from tests.contract.engine.requests import a_request
from tests.integration.engine.conftest import SavedModel
from tests.integration.engine.running import answer, steps
from tests.integration.engine.test_agreement import mixed_requests, run_staggered

pytestmark = pytest.mark.anyio

Saved = Callable[[str], SavedModel]
Ids = npt.NDArray[np.int64]
PROMPT = tuple(range(10, 21))


def chosen_by(model: nn.Module, token_ids: Sequence[int]) -> Ids:
    """Compute in one plain pass which experts a model chooses: [T, layers, top_k], in the order of their ids."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([list(token_ids)]), output_router_logits=True).router_logits
    found: Ids = torch.stack([each.topk(2).indices for each in logits], 1).sort(-1).values.numpy()
    return found


def ids_of(completion: Completion) -> Ids:
    assert completion.experts is not None
    return np.sort(completion.experts.ids().astype(np.int64), -1)


def all_tokens(request: GenerationRequest, completion: Completion) -> list[int]:
    return [*request.prompt_ids, *completion.token_ids.tolist()]


@pytest.mark.parametrize("goes_ahead", [False, True])
@pytest.mark.parametrize(("family", "layers"), [("qwen3-moe", 2), ("mixtral", 3)])
def test_the_record_is_what_the_model_chooses_whatever_is_in_the_batch(
    saved: Saved, family: str, layers: int, goes_ahead: bool
) -> None:
    engine = saved(family).engine(records_experts=True, goes_ahead=goes_ahead)
    requests = mixed_requests(7)

    answers = run_staggered(engine, requests)

    for request in requests:
        for completion in answers[request.request_id]:
            tokens = all_tokens(request, completion)
            assert completion.experts is not None
            assert completion.experts.sizes == RoutingSizes(layers, 2, 8)
            assert completion.experts.num_tokens == len(tokens) - 1
            assert ids_of(completion).tolist() == chosen_by(saved(family).model, tokens)[:-1].tolist()


def test_recording_changes_no_token_and_is_off_by_default(saved: Saved) -> None:
    request = a_request(PROMPT, seeds=(1, 2), max_new_tokens=20)

    plain = answer(saved("qwen3-moe").engine(), request)
    recorded = answer(saved("qwen3-moe").engine(records_experts=True), request)

    for one, other in zip(plain, recorded, strict=True):
        assert one.experts is None
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.log_probs.tolist() == other.log_probs.tolist()


@pytest.mark.parametrize("mode", [OnWeightUpdate.INTERRUPT, OnWeightUpdate.CONTINUE])
def test_after_an_update_tokens_keep_the_experts_that_sampled_what_follows_them(
    saved: Saved, tmp_path: Path, mode: OnWeightUpdate
) -> None:
    new = save_model("qwen3-moe", tmp_path, seed=1)
    engine = saved("qwen3-moe").engine(records_experts=True)
    request = a_request(PROMPT, seeds=(1, 2, 3), max_new_tokens=30)
    engine.submit(request)
    answers = steps(engine, 9)

    engine.request_update(1, tmp_path / "model.safetensors", 5, mode)
    completions = (answers | steps(engine))[request.request_id]

    for completion in completions:
        [_, (start, _)] = completion.versions
        tokens, found = all_tokens(request, completion), ids_of(completion)
        # The first token that the new weights sampled was sampled behind one that they read.
        first = len(PROMPT) + start - 1
        assert found[:first].tolist() == chosen_by(saved("qwen3-moe").model, tokens)[:first].tolist()
        if mode is OnWeightUpdate.INTERRUPT:
            assert found[first:].tolist() == chosen_by(new, tokens)[first:-1].tolist()
        assert found.shape[0] == len(tokens) - 1


def test_an_interrupted_completion_goes_on_with_its_record(saved: Saved) -> None:
    engine = saved("qwen3-moe").engine(records_experts=True)
    whole = a_request(PROMPT, seeds=(7,), max_new_tokens=20)
    [expected] = answer(engine, whole)
    begun = a_request(PROMPT, seeds=(7,), max_new_tokens=20)
    engine.submit(begun)
    steps(engine, 6)
    engine.abort(begun.request_id)
    [part] = steps(engine)[begun.request_id]
    assert part.experts is not None
    assert part.experts.num_tokens == len(PROMPT) + len(part.token_ids) - 1
    # A record that no pass here would make: it must stay what it is.
    other = RoutedExperts.of((part.experts.ids().astype(np.int64) + 1) % 8, 8)
    prefix = Prefix(tuple(part.token_ids.tolist()), tuple(part.log_probs.tolist()), part.versions, other)
    resume = ResumeRule(mixes_versions=True)

    [found] = answer(engine, a_request(PROMPT, seeds=(7,), max_new_tokens=20, prefixes=(prefix,), resume=resume))

    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.experts is not None
    assert expected.experts is not None
    known = other.num_tokens
    assert found.experts.ids()[:known].tolist() == other.ids().tolist()
    assert found.experts.ids()[known:].tolist() == expected.experts.ids()[known:].tolist()


def test_what_came_without_a_record_gets_that_of_the_pass_that_reads_it_again(saved: Saved) -> None:
    engine = saved("qwen3-moe").engine(records_experts=True)
    [expected] = answer(engine, a_request(PROMPT, seeds=(7,), max_new_tokens=20))
    prefix = Prefix(tuple(expected.token_ids[:5].tolist()), tuple(expected.log_probs[:5].tolist()), ((0, 0),))
    resume = ResumeRule(mixes_versions=True)

    [found] = answer(engine, a_request(PROMPT, seeds=(7,), max_new_tokens=20, prefixes=(prefix,), resume=resume))

    assert ids_of(found).tolist() == ids_of(expected).tolist()


async def test_a_record_crosses_from_the_engines_process(saved: Saved) -> None:
    model = saved("qwen3-moe")
    engine = ProcessEngine(EngineSettings(str(model.path), slots=4, context_tokens=64, records_experts=True))
    request = a_request(PROMPT, seeds=(1, 2))
    await engine.start()
    try:
        completions = await engine.generate(request)
    finally:
        await engine.close()

    for completion in completions:
        assert ids_of(completion).tolist() == chosen_by(model.model, all_tokens(request, completion))[:-1].tolist()


@pytest.mark.parametrize(
    ("family", "why"),
    [("qwen3", "needs a mixture of experts"), ("gpt2", "has no routers"), ("mamba", "has no routers")],
)
def test_a_model_without_routers_is_refused(saved: Saved, family: str, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        saved(family).engine(records_experts=True)


@pytest.mark.parametrize("short", [0, 1, 40])
def test_a_prefix_whose_record_has_another_length_is_refused(saved: Saved, short: int) -> None:
    engine = saved("qwen3-moe").engine(records_experts=True)
    record: Any = RoutedExperts.of(np.tile(np.array([1, 2]), (short, 2, 1)), 8)
    prefix = Prefix((5, 6), (-1.0, -1.0), ((0, 0),), record)

    with pytest.raises(Exception, match="experts of all tokens but the last"):
        engine.submit(a_request(PROMPT, prefixes=(prefix,)))
