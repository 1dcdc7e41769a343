"""A loop of the Tinker client: ``python loop.py URL KEY MODEL KIND STEPS``; a line for each step.

Runs in the client's environment, without anything of ours.
"""

import json
import sys

import tinker
from tinker import types

PROMPT = "Ana has 3 pens"
TEXTS = ("Ana has 3 pens, buys 4. So she has 7", "Ana has 12 pens, buys 5. So she has 17")


def say(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def tensor(values: list[float] | list[int], dtype: str = "float32") -> types.TensorData:
    return types.TensorData(data=values, dtype=dtype, shape=[len(values)])  # type: ignore[arg-type]


def supervised(client: tinker.TrainingClient, tokenizer: object, steps: int) -> None:
    """Learn two sentences by heart."""
    rows = [tokenizer.encode(text) for text in TEXTS]  # type: ignore[attr-defined]
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(ids[:-1]),
            loss_fn_inputs={
                "target_tokens": tensor(ids[1:], "int64"),
                "weights": tensor([1.0] * (len(ids) - 1)),
            },
        )
        for ids in rows
    ]
    for step in range(steps):
        passed = client.forward_backward(data, "cross_entropy")
        updated = client.optim_step(types.AdamParams(learning_rate=5e-3))
        loss = passed.result().metrics["loss:sum"]
        updated.result()
        say(step=step, loss=loss)


def reinforced(client: tinker.TrainingClient, tokenizer: object, steps: int) -> None:
    """Learn to write a token of the lower half of the vocabulary; each step samples from what was just saved."""
    ids = tokenizer.encode(PROMPT)  # type: ignore[attr-defined]
    for step in range(steps):
        sampler = client.save_weights_and_get_sampling_client().result()
        how = types.SamplingParams(max_tokens=6, temperature=1.0, seed=step)
        found = sampler.sample(prompt=types.ModelInput.from_ints(ids), num_samples=32, sampling_params=how).result()
        rewards = [sum(token < 193 for token in each.tokens) / len(each.tokens) for each in found.sequences]
        mean = sum(rewards) / len(rewards)
        data = []
        for each, reward in zip(found.sequences, rewards, strict=True):
            before = len(ids) - 1
            whole = [*ids, *each.tokens]
            inputs = {
                "target_tokens": tensor([0] * before + list(each.tokens), "int64"),
                "logprobs": tensor([0.0] * before + list(each.logprobs)),
                "advantages": tensor([0.0] * before + [reward - mean] * len(each.tokens)),
            }
            data.append(types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=inputs))
        passed = client.forward_backward(data, "importance_sampling")
        updated = client.optim_step(types.AdamParams(learning_rate=1e-2))
        loss = passed.result().metrics["loss:sum"]
        updated.result()
        say(step=step, loss=loss, reward=mean)


def main() -> None:
    url, key, model, kind, steps = sys.argv[1:]
    service = tinker.ServiceClient(base_url=url, api_key=key)
    client = service.create_lora_training_client(base_model=model, rank=8, seed=1).result()
    say(model_id=client.model_id)
    {"supervised": supervised, "reinforced": reinforced}[kind](client, client.get_tokenizer(), int(steps))


if __name__ == "__main__":
    main()
