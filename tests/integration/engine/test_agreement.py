"""The engine says what transformers says: log-probabilities and greedy tokens, for each family that it may meet."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from flotilla.services.rollout.engines.base import GenerationRequest
from flotilla.services.rollout.engines.decoders.native import kernels
from flotilla.services.rollout.engines.embedded.engine import TorchEngine
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.shared.errors import ModelError
from tests.contract.engine.models import FAMILIES, VOCAB, all_scores, make_model, save_model, scores
from tests.contract.engine.requests import a_request
from tests.integration.engine.conftest import SavedModel
from tests.integration.engine.running import Answers, answer, steps

Saved = Callable[[str], SavedModel]


def mixed_requests(num: int, *, seed: int = 0, **sampling: Any) -> list[GenerationRequest]:
    """Make requests of different prompts, lengths and group sizes."""
    generator = np.random.default_rng(seed)
    return [
        a_request(
            generator.integers(2, VOCAB, generator.integers(1, 25)).tolist(),
            seeds=generator.integers(0, 2**62, generator.integers(1, 5)).tolist(),
            **{"max_new_tokens": int(generator.integers(3, 30)), **sampling},
        )
        for _ in range(num)
    ]


def run_staggered(engine: TorchEngine, requests: Sequence[GenerationRequest]) -> Answers:
    """Let requests join a batch that runs, one after the other, so that rows are taken, left and moved."""
    answers: Answers = {}
    for number, request in enumerate(requests):
        engine.submit(request)
        answers |= steps(engine, 2 * (number % 3))
    return answers | steps(engine)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_transformers(saved: Saved, family: str) -> None:
    engine = saved(family).engine()
    requests = mixed_requests({"fused": 9, "cached": 5, "recomputed": 3}[FAMILIES[family][2]])

    answers = run_staggered(engine, requests)

    assert FAMILIES[family][2] in engine.description
    for request in requests:
        for completion in answers[request.request_id]:
            expected = scores(saved(family).model, request.prompt_ids, completion.token_ids)
            np.testing.assert_allclose(completion.log_probs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_without_a_compiler_torch_computes_the_same(saved: Saved, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_kernels", lambda: None)
    engine = saved(family).engine()
    requests = mixed_requests(9)

    answers = run_staggered(engine, requests)

    assert engine.description == "fused forward"
    for request in requests:
        for completion in answers[request.request_id]:
            expected = scores(saved(family).model, request.prompt_ids, completion.token_ids)
            np.testing.assert_allclose(completion.log_probs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2", "mistral-window"])
def test_greedy_tokens_are_those_of_generate(saved: Saved, family: str) -> None:
    requests = mixed_requests(6, greedy=True, max_new_tokens=20)

    answers = run_staggered(saved(family).engine(), requests)

    for request in requests:
        prompt = torch.tensor([request.prompt_ids])
        generated = saved(family).model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20, min_new_tokens=20
        )
        # `min_new_tokens` forbids the end of sequence, which the engine merely ignores: compare up to there.
        expected = generated[0, prompt.shape[1] :].tolist()
        for completion in answers[request.request_id]:
            sampled = completion.token_ids.tolist()
            agreed = sampled.index(1) if 1 in sampled else len(sampled)
            assert sampled[:agreed] == expected[:agreed]
            assert agreed > 0


def test_a_temperature_divides_the_logits_of_the_recorded_log_prob(saved: Saved) -> None:
    [request] = mixed_requests(1, temperature=0.6, top_k=5, top_p=0.8)

    for completion in answer(saved("qwen3").engine(), request):
        at_one = all_scores(saved("qwen3").model, request.prompt_ids, completion.token_ids)
        at_temperature = torch.from_numpy(at_one / 0.6).log_softmax(dim=-1).numpy()
        expected = at_temperature[np.arange(completion.token_ids.size), completion.token_ids]
        np.testing.assert_allclose(completion.log_probs, expected, atol=1e-5, rtol=0)
        ranks = (at_one > at_one[np.arange(completion.token_ids.size), completion.token_ids][:, None]).sum(axis=1)
        assert ranks.max() < 5


def test_greedy_records_the_log_prob_at_temperature_one(saved: Saved) -> None:
    [completion] = answer(saved("qwen3").engine(), a_request(greedy=True, temperature=0.5))

    expected = scores(saved("qwen3").model, (5, 6, 7), completion.token_ids)
    np.testing.assert_allclose(completion.log_probs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_completion_does_not_depend_on_its_neighbours(saved: Saved, family: str) -> None:
    requests = mixed_requests(6)
    crowded = run_staggered(saved(family).engine(), requests)
    lonely = saved(family).engine(slots=1)

    for request in requests:
        alone = answer(lonely, request)

        for one, other in zip(crowded[request.request_id], alone, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5, rtol=0)


def test_a_group_is_prefilled_once(saved: Saved) -> None:
    engine = saved("qwen3").engine()

    answer(engine, a_request(range(2, 32), seeds=range(12), max_new_tokens=5))

    assert engine.load().prefilled_tokens == 30
    assert engine.load().generated_tokens == 60


def test_a_prompt_longer_than_the_prefill_budget_is_computed(saved: Saved) -> None:
    engine = saved("qwen3").engine(prefill_tokens=16)
    requests = [a_request(range(2, 2 + length), max_new_tokens=4) for length in (60, 3, 40, 41, 5)]

    answers = run_staggered(engine, requests)

    for request in requests:
        [completion] = answers[request.request_id]
        expected = scores(saved("qwen3").model, request.prompt_ids, completion.token_ids)
        np.testing.assert_allclose(completion.log_probs, expected, atol=1e-5, rtol=0)


def test_the_context_is_usable_to_its_last_token(saved: Saved) -> None:
    engine = saved("qwen3").engine(context_tokens=101)
    request = a_request(range(2, 53), max_new_tokens=50)

    [completion] = answer(engine, request)

    expected = scores(saved("qwen3").model, request.prompt_ids, completion.token_ids)
    np.testing.assert_allclose(completion.log_probs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_the_context_never_exceeds_the_positions_of_the_model(saved: Saved, family: str) -> None:
    assert saved(family).engine(context_tokens=4096).context_tokens == 128


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
def test_bfloat16_is_close_to_transformers_in_bfloat16(saved: Saved, family: str) -> None:
    engine = saved(family).engine(dtype="bfloat16")
    reference = make_model(family).to(torch.bfloat16)
    requests = mixed_requests(4)

    answers = run_staggered(engine, requests)

    differences = [
        np.abs(completion.log_probs - scores(reference, request.prompt_ids, completion.token_ids))
        for request in requests
        for completion in answers[request.request_id]
    ]
    assert np.mean(np.concatenate(differences)) < 0.05


def test_a_sharded_checkpoint_is_read(saved: Saved, tmp_path: Path) -> None:
    source = saved("qwen3").path
    tensors = load_file(source / "model.safetensors")
    halves = [dict(list(tensors.items())[:9]), dict(list(tensors.items())[9:])]
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, half in zip(names, halves, strict=True):
        save_file(half, tmp_path / name)
    weight_map = {key: name for name, half in zip(names, halves, strict=True) for key in half}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text((source / "config.json").read_text())

    [sharded] = answer(TorchEngine(EngineSettings(str(tmp_path), slots=4, context_tokens=64)), a_request())

    [whole] = answer(saved("qwen3").engine(), a_request())
    assert sharded.token_ids.tolist() == whole.token_ids.tolist()
    assert sharded.log_probs.tolist() == whole.log_probs.tolist()


def test_a_configuration_that_leaves_defaults_out_is_completed(tmp_path: Path) -> None:
    model = save_model("qwen3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("rms_norm_eps", "tie_word_embeddings", "sliding_window", "rope_parameters"):
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))

    engine = TorchEngine(EngineSettings(str(tmp_path), slots=4, context_tokens=64))
    [completion] = answer(engine, a_request())

    assert "fused" in engine.description
    np.testing.assert_allclose(completion.log_probs, scores(model, (5, 6, 7), completion.token_ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_batch_invariance_makes_a_completion_the_same_to_the_last_bit_in_any_company(saved: Saved, family: str) -> None:
    requests = mixed_requests(7, max_new_tokens=12)
    engines = [saved(family).engine(batch_invariant=True) for _ in range(2)]
    crowded, backwards = run_staggered(engines[0], requests), run_staggered(engines[1], requests[::-1])

    for request in requests:
        alone = answer(engines[1], request)

        for first, second, third in zip(crowded[request.request_id], backwards[request.request_id], alone, strict=True):
            assert first.token_ids.tolist() == second.token_ids.tolist() == third.token_ids.tolist()
            assert first.log_probs.tobytes() == second.log_probs.tobytes() == third.log_probs.tobytes()


def test_batch_invariance_is_refused_where_it_cannot_be_had(saved: Saved) -> None:
    with pytest.raises(ModelError, match="batch_invariant needs the fused forward"):
        saved("gpt2").engine(batch_invariant=True)
