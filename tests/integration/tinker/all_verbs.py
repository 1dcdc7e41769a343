"""All that the Tinker client can ask of this fleet: ``python all_verbs.py URL KEY MODEL``; fails where it differs.

Runs in the client's environment, without anything of ours.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import tinker
from tinker import types

LOSSES = (
    ("importance_sampling", None),
    ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
    ("cispo", None),
    ("dro", {"beta": 0.1}),
    ("gspo", None),
    ("stable_reinforce", None),
)


def tensor(values: list[float] | list[int], dtype: str = "float32") -> types.TensorData:
    return types.TensorData(data=values, dtype=dtype, shape=[len(values)])  # type: ignore[arg-type]


def answers(prompt: list[int], sequences: list[types.SampledSequence]) -> list[types.Datum]:
    """Make data of answers, the first of which is to become likelier and the others less likely."""
    data, before = [], len(prompt) - 1
    for number, each in enumerate(sequences):
        inputs = {
            "target_tokens": tensor([0] * before + list(each.tokens), "int64"),
            "logprobs": tensor([0.0] * before + list(each.logprobs)),
            "advantages": tensor([0.0] * before + [1.0 if number == 0 else -1.0] * len(each.tokens)),
            "sequence_ratio_mask": tensor([0.0] * before + [1.0] * len(each.tokens)),
        }
        whole = types.ModelInput.from_ints([*prompt, *each.tokens][:-1])
        data.append(types.Datum(model_input=whole, loss_fn_inputs=inputs))
    return data


def samples_and_scores(sampler: tinker.SamplingClient, prompt: list[int]) -> list[types.SampledSequence]:
    given = types.ModelInput.from_ints(prompt)
    how = types.SamplingParams(max_tokens=8, temperature=1.0, seed=3)
    found = sampler.sample(prompt=given, num_samples=3, sampling_params=how).result()
    again = sampler.sample(prompt=given, num_samples=3, sampling_params=how).result()
    assert [each.tokens for each in found.sequences] == [each.tokens for each in again.sequences]
    assert len({each.sequence_id for each in found.sequences}) == 3
    first = found.sequences[0]
    scores = sampler.compute_logprobs(types.ModelInput.from_ints([*prompt, *first.tokens])).result()
    # The trainer scores, and the engine has sampled.
    assert scores[0] is None
    assert np.allclose(scores[-len(first.tokens) :], first.logprobs, atol=1e-4), (scores, first.logprobs)
    one = types.SamplingParams(max_tokens=1)
    top = sampler.sample(given, 1, one, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
    assert top.topk_prompt_logprobs is not None
    assert [row and len(row) for row in top.topk_prompt_logprobs] == [None, *[2] * (len(prompt) - 1)]
    last = sampler.compute_logprobs(given, prompt_logprobs_last_n=1).result()
    assert [each is None for each in last] == [True] * (len(prompt) - 1) + [False]
    return list(found.sequences)


def saves_and_loads(service: tinker.ServiceClient, client: tinker.TrainingClient, data: list[types.Datum]) -> None:
    saved = client.save_state("a").result().path
    other = service.create_training_client_from_state_with_optimizer(saved).result()
    seen = []
    for each in (client, other):
        each.forward_backward(data, "cross_entropy").result()
        each.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        seen.append(each.forward(data, "cross_entropy").result().metrics["loss:sum"])
    assert seen[0] == seen[1], seen
    fresh = service.create_training_client_from_state(saved).result()
    assert fresh.get_info().lora_rank == 8


def in_flight(client: tinker.TrainingClient, prompt: list[int], data: list[types.Datum]) -> None:
    given, how = types.ModelInput.from_ints(prompt), types.SamplingParams(max_tokens=4)
    first = client.save_weights_and_get_sampling_client(kind="inflight").result()
    before = first.compute_logprobs(given).result()
    client.forward_backward(data, "importance_sampling").result()
    client.optim_step(types.AdamParams(learning_rate=0.1)).result()
    client.save_weights_and_get_sampling_client(kind="inflight").result()
    assert first.sample(given, 1, how).result().sequences[0].tokens
    assert first.compute_logprobs(given).result() != before, "what is in flight follows the newest weights"


def downloads(client: tinker.TrainingClient, rest: tinker.RestClient) -> None:
    path = client.save_weights_external("c", ttl_seconds=3600).result().path
    answer = rest.get_external_weights_urls(path).result()
    assert sorted(answer.urls) == ["adapter_config.json", "adapter_model.safetensors"], answer.urls
    with tempfile.TemporaryDirectory() as folder:
        from tinker_cookbook.weights import download

        base_url = answer.urls["adapter_config.json"].partition("/api/")[0]
        found = Path(download(tinker_path=path, output_dir=folder, base_url=base_url))
        assert json.loads((found / "adapter_config.json").read_text())["r"] == 8
        assert (found / "adapter_model.safetensors").stat().st_size > 1000
    rest.delete_checkpoint_from_tinker_path(path).result()


def main() -> None:
    url, key, model = sys.argv[1:]
    os.environ["TINKER_API_KEY"] = key
    service = tinker.ServiceClient(base_url=url, api_key=key)
    rest = tinker.RestClient(base_url=url, api_key=key)
    served = rest.get_server_capabilities().result().supported_models
    assert [each.model_name for each in served] == [model]
    client = service.create_lora_training_client(base_model=model, rank=8, seed=1).result()
    prompt = client.get_tokenizer().encode("Ana has 3")
    samples_and_scores(service.create_sampling_client(base_model=model).result(), prompt)
    sequences = samples_and_scores(client.save_weights_and_get_sampling_client().result(), prompt)
    data = answers(prompt, sequences)
    for loss, config in LOSSES:
        found = client.forward_backward(data, loss, config).result()
        assert len(found.loss_fn_outputs) == 3
        assert np.isfinite(found.metrics["loss:sum"])
        assert found.loss_fn_outputs[0]["logprobs"].shape == [len(prompt) - 1 + len(sequences[0].tokens)]

    def custom(_: list[types.Datum], log_probs: list[object]) -> tuple[object, dict[str, float]]:
        total = sum((each**2).sum() for each in log_probs)  # type: ignore[operator, attr-defined]
        return total, {"own": 1.0}

    try:
        import torch  # noqa: F401
    except ImportError:
        sys.stderr.write("custom losses need torch in the client's environment\n")
    else:
        plain = [
            types.Datum(each.model_input, {"target_tokens": each.loss_fn_inputs["target_tokens"]}) for each in data
        ]
        assert client.forward_backward_custom(plain, custom).result().metrics["own"] == 1.0
    client.optim_step(types.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)).result()
    many = client.forward_backward(data * 400, "importance_sampling").result()
    assert len(many.loss_fn_outputs) == 1200, "two chunks of one call"
    client.optim_step(types.AdamParams(learning_rate=0.0)).result()
    saves_and_loads(
        service,
        client,
        [
            types.Datum(
                each.model_input,
                {"target_tokens": each.loss_fn_inputs["target_tokens"], "weights": each.loss_fn_inputs["advantages"]},
            )
            for each in data
        ],
    )
    in_flight(client, prompt, data)
    downloads(client, rest)
    named = client.save_weights_for_sampler("b").result().path
    service.create_sampling_client(model_path=named).result().sample(
        types.ModelInput.from_ints(prompt), 1, types.SamplingParams(max_tokens=2, stop=[])
    ).result()
    assert [each.checkpoint_id for each in rest.list_checkpoints(client.model_id).result().checkpoints] == [
        "weights/a",
        "sampler_weights/b",
    ]
    info = rest.get_weights_info_by_tinker_path(named).result()
    assert (info.base_model, info.lora_rank, info.train_unembed) == (model, 8, False)
    rest.set_checkpoint_ttl_from_tinker_path(named, 7200).result()
    rest.publish_checkpoint_from_tinker_path(named).result()
    assert rest.list_checkpoints(client.model_id).result().checkpoints[1].public
    rest.delete_checkpoint_from_tinker_path(named).result()
    assert [each.checkpoint_id for each in rest.list_user_checkpoints().result().checkpoints] == ["weights/a"]
    assert client.model_id in [each.training_run_id for each in rest.list_training_runs().result().training_runs]
    try:
        client.forward_backward(data, "nonsense").result()  # type: ignore[arg-type]
    except tinker.RequestFailedError as error:
        assert "is not served" in str(error)
    else:
        raise AssertionError("a loss that is not there was computed")
    service.close("success").result()


if __name__ == "__main__":
    main()
