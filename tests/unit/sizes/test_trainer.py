"""What is predicted of memory: sizes of models, passes, batches, the processes, and what does not fit."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.sections.model import LoraConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import ModelError, Unavailable
from flotilla.shared.sizes.batches import arithmetic_of
from flotilla.shared.sizes.engine import engine_footprint, longest_sample, used_slots
from flotilla.shared.sizes.fitting import check_device, check_host, overflow, refusal
from flotilla.shared.sizes.model import ModelSizes, read_sizes, sizes_of
from flotilla.shared.sizes.parts import Footprint, Part, in_words
from flotilla.shared.sizes.passes import How, PassSizes, head_bytes, hole_bytes, kept_bytes, layer_bytes
from flotilla.shared.sizes.starting import check_engine, check_trainer
from flotilla.shared.sizes.trainer import trained_parameters, trainer_footprint, weight_size

V, H, LAYERS, Q, K, INNER = 300, 64, 2, 64, 32, 128
CONFIG: dict[str, Any] = {
    "hidden_size": H,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": INNER,
    "vocab_size": V,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
}
LAYER = {
    "self_attn.q_proj.weight": (Q, H),
    "self_attn.k_proj.weight": (K, H),
    "self_attn.v_proj.weight": (K, H),
    "self_attn.o_proj.weight": (H, Q),
    "self_attn.q_norm.weight": (16,),
    "self_attn.k_norm.weight": (16,),
    "mlp.gate_proj.weight": (INNER, H),
    "mlp.up_proj.weight": (INNER, H),
    "mlp.down_proj.weight": (H, INNER),
    "input_layernorm.weight": (H,),
    "post_attention_layernorm.weight": (H,),
}
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (V, H),
    "model.norm.weight": (H,),
    **{f"model.layers.{number}.{name}": shape for number in range(LAYERS) for name, shape in LAYER.items()},
}
PARAMETERS = V * H + H + LAYERS * (2 * Q * H + 2 * K * H + 3 * INNER * H + 32 + 2 * H)


def a_model(directory: Path, **changes: Any) -> Path:
    """Write a model's configuration and the header of weights, of which none is there."""
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    header, offset = {}, 0
    for name, shape in SHAPES.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    return directory


def sizes(**changes: Any) -> ModelSizes:
    return sizes_of(CONFIG | changes, SHAPES)


def a_spec(**sections: Any) -> ExperimentSpec:
    written: dict[str, Any] = {
        "name": "sizes",
        "model": {"path": "nowhere"},
        "data": {"path": "rows.jsonl", "max_prompt_tokens": 16},
        "reward": {"components": [{"kind": "numeric"}]},
        "rollout": {"group_size": 4, "sampling": {"max_new_tokens": 48}, "engine": {"context_tokens": 128}},
        "optimisation": {"steps": 5, "groups_per_mini_batch": 4, "micro_batch_tokens": 256},
    }
    for name, section in sections.items():
        written[name] = {**written.get(name, {}), **section}
    return validate_spec(written)


def parts_of(footprint: Footprint) -> dict[str, int]:
    return {each.name: each.num_bytes for each in footprint.parts}


def test_sizes_are_read_of_a_models_files(tmp_path: Path) -> None:
    found = read_sizes(a_model(tmp_path))

    assert (found.parameters, found.vocabulary, found.queries, found.keys) == (PARAMETERS, V, Q, K)
    assert found.is_tied and found.has_head_norms and found.is_gated
    assert found.frozen(("*embed*",)) == V * H


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_configuration_that_does_not_say_its_sizes_is_named(missing: str) -> None:
    with pytest.raises(ModelError, match=missing):
        sizes_of({name: value for name, value in CONFIG.items() if name != missing}, SHAPES)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        read_sizes(tmp_path)


def test_adapters_are_counted_of_the_layers_that_are_named() -> None:
    per_layer = (Q + H) + 2 * (K + H) + (H + Q) + 3 * (INNER + H)

    assert sizes().adapters(LoraConfig(rank=2)) == 2 * LAYERS * per_layer
    assert sizes().adapters(LoraConfig(rank=2, targets=("q_proj",))) == 2 * LAYERS * (Q + H)
    assert sizes().adapters(LoraConfig(rank=2, exclude=("layers.0.mlp.up_proj",))) == 2 * LAYERS * per_layer - 2 * (
        INNER + H
    )


def test_a_step_has_its_samples_passes_updates_and_tokens() -> None:
    step = arithmetic_of(a_spec(asynchrony={"require_batches": 2}, optimisation={"epochs_per_step": 3}))
    largest = step.largest_pass(256)

    assert (step.prompts, step.samples, step.updates, step.sample_tokens) == (8, 32, 6, 64)
    assert step.tokens == 32 * 64
    # One prompt and four answers, twice of each: 2 * 16 + 4 * 48 = 224, and 272 with a fifth answer.
    assert (largest.positions, largest.sequences, largest.slots, largest.labels) == (208, 4, 256, 192)
    assert step.passes(largest) == 4


def test_padded_rows_hold_a_prompt_for_each_answer() -> None:
    assert arithmetic_of(a_spec()).largest_pass(256, shares_prompts=False) == PassSizes(256, 256, 192, 4)


def test_a_sample_that_is_longer_than_the_bound_makes_a_pass_of_its_own() -> None:
    assert arithmetic_of(a_spec()).largest_pass(1).sequences == 1


def test_ranks_share_the_samples() -> None:
    step = arithmetic_of(a_spec(parallelism={"ranks": 4, "tensor_parallel": 2, "device": "cpu"}))

    assert (step.shares, step.samples_of_rank) == (2, 8)


def test_layers_that_are_computed_twice_keep_their_input_alone() -> None:
    taken = PassSizes(100, 100, 80, 4)
    how = How(size=4, is_native=True, recomputes=False, trains_head=True)
    again = How(size=4, is_native=True, recomputes=True, trains_head=True)
    deep = sizes(num_hidden_layers=12)

    saved = kept_bytes(deep, taken, how) - kept_bytes(deep, taken, again)
    assert saved == 11 * layer_bytes(deep, taken, how) - 12 * 100 * H * 4


def test_logits_of_a_large_vocabulary_are_held_a_chunk_at_a_time() -> None:
    how = How(size=4, is_native=True, recomputes=False, trains_head=False)
    large = sizes(vocab_size=100_000)

    assert head_bytes(large, PassSizes(9000, 9000, 9000, 9), how) == 4 * 1024 * 100_000
    assert head_bytes(sizes(), PassSizes(2000, 2000, 2000, 9), how) == 4 * 2000 * V, "small ones are kept"


def test_layers_leave_holes_in_the_heap_unless_their_blocks_are_mapped_apart() -> None:
    how = How(size=4, is_native=True, recomputes=False, trains_head=True)
    bound = (32 << 20) // (4 * INNER)

    assert hole_bytes(sizes(), PassSizes(100, 100, 80, 4), how) == LAYERS * 3 * 100 * INNER * 4
    assert hole_bytes(sizes(), PassSizes(bound, bound, bound, 1), how) == 0
    adapted = hole_bytes(sizes(), PassSizes(100, 100, 80, 4), how, LoraConfig(rank=2, targets=("q_proj", "up_proj")))
    assert adapted == LAYERS * 3 * 100 * (Q + INNER) * 4


def test_holes_are_the_hosts_and_are_needed_by_nothing() -> None:
    alone = trainer_footprint(a_spec(), sizes())
    there = trainer_footprint(a_spec(parallelism={"device": "cuda:0"}), sizes())

    assert parts_of(alone)["holes in the heap"] == LAYERS * 3 * 208 * INNER * 4
    assert "holes in the heap" not in parts_of(there)
    assert all(each.needed == 0 for each in alone.parts if each.name == "holes in the heap")


def test_a_trainer_has_weights_moments_gradients_and_images() -> None:
    found = parts_of(trainer_footprint(a_spec(), sizes()))

    assert found["weights"] == found["gradients"] == 4 * PARAMETERS
    assert found["moments"] == found["images to publish"] == 8 * PARAMETERS
    assert "float32 masters" not in found and "reference" not in found


def test_bfloat16_has_masters_unless_the_weights_are_trained() -> None:
    in_bfloat16 = {"dtype": "bfloat16"}
    with_masters = parts_of(trainer_footprint(a_spec(model=in_bfloat16), sizes()))
    without = parts_of(trainer_footprint(a_spec(model=in_bfloat16, optimisation={"masters": "model"}), sizes()))

    assert (with_masters["weights"], with_masters["float32 masters"]) == (2 * PARAMETERS, 4 * PARAMETERS)
    assert (with_masters["moments"], without["moments"]) == (8 * PARAMETERS, 4 * PARAMETERS)
    assert "float32 masters" not in without


def test_adapters_alone_have_moments_and_are_published() -> None:
    spec = a_spec(model={"lora": {"rank": 2}}, asynchrony={"publication": {"lora": "adapters"}})
    found, trained = parts_of(trainer_footprint(spec, sizes())), sizes().adapters(LoraConfig(rank=2))

    assert trained_parameters(spec, sizes()) == trained
    assert (found["weights"], found["moments"]) == (4 * PARAMETERS, 8 * trained)
    assert found["images to publish"] == 8 * trained


def test_each_rank_has_all_packed_weights() -> None:
    packed = {"lora": {"rank": 2, "quantisation": {"dtype": "nf4"}}}
    alone, shared = (
        parts_of(trainer_footprint(a_spec(model=packed, parallelism=ranks), sizes()))["weights"]
        for ranks in ({"device": "cpu"}, {"ranks": 2, "device": "cpu"})
    )
    linear = LAYERS * (2 * Q * H + 2 * K * H + 3 * INNER * H)

    assert alone - shared == 4 * (PARAMETERS - linear) // 2


def test_ranks_divide_what_stands_between_steps() -> None:
    alone = parts_of(trainer_footprint(a_spec(), sizes()))
    shared = parts_of(trainer_footprint(a_spec(parallelism={"ranks": 2, "device": "cpu"}), sizes()))

    assert shared["weights"] == alone["weights"] // 2 and shared["moments"] == alone["moments"] // 2
    assert shared["gathered weights"] == 2 * 4 * V * H


def test_what_else_the_trainer_holds_is_counted() -> None:
    kl: dict[str, Any] = {"algorithm": {"kl": {"placement": "loss"}}}
    kept: dict[str, Any] = {"algorithm": {"old_log_probs": "recompute_at_version"}}

    assert parts_of(trainer_footprint(a_spec(**kl), sizes()))["reference"] == 4 * PARAMETERS
    averaged = a_spec(optimisation={"average_decay": 0.9})
    assert parts_of(trainer_footprint(averaged, sizes()))["moving average"] == 4 * PARAMETERS
    assert parts_of(trainer_footprint(a_spec(**kept), sizes()))["kept versions"] == 4 * 4 * PARAMETERS


def test_auto_takes_passes_that_fit_what_is_free() -> None:
    spec = a_spec(optimisation={"micro_batch_tokens": "auto", "groups_per_mini_batch": 64})
    plenty = trainer_footprint(spec, sizes(), free=10**10)
    little = trainer_footprint(spec, sizes(), free=8 * 10**6)

    assert little.total < plenty.total
    assert spec.optimisation.micro_batch_tokens == "auto" and weight_size(spec) == 4


def test_remedies_begin_with_the_largest_saving() -> None:
    found = trainer_footprint(a_spec(), sizes()).remedies

    assert [saved for _, saved in found] == sorted((saved for _, saved in found), reverse=True)
    assert any(key.startswith("model.lora") for key, _ in found)


def test_an_engine_has_two_sets_of_weights_and_a_cache_for_its_slots() -> None:
    spec = a_spec(asynchrony={"staleness_threshold": 0.5})
    found = engine_footprint(spec, sizes())

    assert found is not None
    parts = parts_of(found)
    # Four groups and half as many ahead, of four samples each, of 16 + 48 tokens.
    assert parts["KV cache"] == 24 * 64 * 2 * LAYERS * K * 4
    assert parts["weights"] == parts["spare weights"] == 4 * (PARAMETERS + V * H), "the native kernels pack a head"


def test_what_is_evaluated_may_fill_all_slots_with_longer_samples() -> None:
    spec = a_spec(
        evaluation={"path": "rows.jsonl", "max_new_tokens": 96},
        rollout={"engine": {"context_tokens": 128, "slots": 30}},
    )
    engine = spec.rollout.engine

    assert engine.kind == "torch"
    assert (used_slots(spec, engine), longest_sample(spec)) == (30, 112)


def test_other_engines_are_not_predicted() -> None:
    assert engine_footprint(a_spec(rollout={"engine": {"kind": "vllm", "context_tokens": 128}}), sizes()) is None


def a_process(needed: int, most: int, device: str = "cpu") -> Footprint:
    parts = [Part("weights", needed, "1 x 1"), Part("cache", most - needed, "slots", least=0)]
    return Footprint("trainer", device, parts, [("model.lora: {rank: 16}", needed // 2)])


def test_what_cannot_fit_is_refused_with_the_sum_and_what_would_help() -> None:
    told = refusal([(a_process(8 * 10**9, 9 * 10**9), 2)], 10 * 10**9, "this machine")

    assert told is not None
    assert "at least 16.00 GB of memory are needed and this machine has 10.00 GB" in told
    assert "2 x trainer, at least 8.00 GB: weights 8.00 GB (1 x 1)" in told
    assert "model.lora: {rank: 16} (about 8.00 GB less)" in told


def test_what_may_fit_is_not_refused() -> None:
    assert refusal([(a_process(8 * 10**9, 90 * 10**9), 1)], 8 * 10**9, "here") is None
    assert refusal([(a_process(11 * 10**9, 11 * 10**9), 1)], 10 * 10**9, "here") is None, "a prediction is not exact"
    told = overflow([(a_process(8 * 10**9, 90 * 10**9), 1)], 10 * 10**9)
    assert told is not None and "80.00 GB too much" in told
    assert overflow([(a_process(8 * 10**9, 9 * 10**9), 1)], 10 * 10**9) is None


def test_too_little_for_now_may_pass_and_too_little_at_all_does_not() -> None:
    process = a_process(8 * 10**9, 8 * 10**9)

    check_host(process, total=20 * 10**9, available=9 * 10**9)
    with pytest.raises(Unavailable, match=r"this machine now has 2\.00 GB"):
        check_host(process, total=20 * 10**9, available=2 * 10**9)
    with pytest.raises(ModelError, match=r"this machine has 4\.00 GB"):
        check_host(process, total=4 * 10**9, available=2 * 10**9)


def test_a_gpus_memory_counts_apart_from_the_hosts() -> None:
    process = a_process(8 * 10**9, 9 * 10**9, device="cuda:0")

    check_host(process, total=10**9, available=10**9)
    check_device(process, 8 * 10**9)
    with pytest.raises(ModelError, match=r"needed on cuda:0, which has 4\.00 GB"):
        check_device(process, 4 * 10**9)


def test_processes_check_their_room_before_they_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, model = a_spec(), a_model(tmp_path)
    check_trainer(spec, model, device="cpu", device_bytes=None)
    check_engine(spec, model)
    monkeypatch.setattr("flotilla.shared.sizes.starting.limit_bytes", lambda: 10**6)

    with pytest.raises(ModelError, match="trainer, at least"):
        check_trainer(spec, model, device="cpu", device_bytes=None)
    with pytest.raises(ModelError, match="rollout's engine, at least"):
        check_engine(spec, model)


def test_a_model_whose_sizes_nobody_can_read_is_let_through(tmp_path: Path) -> None:
    check_trainer(a_spec(), tmp_path, device="cpu", device_bytes=None)


@pytest.mark.parametrize(("num_bytes", "words"), [(1.5e9, "1.50 GB"), (46.4e6, "46 MB"), (1234, "1.2 kB")])
def test_bytes_are_written_for_people(num_bytes: float, words: str) -> None:
    assert in_words(num_bytes) == words


OFFLOADED: dict[str, Any] = {"ranks": 2, "device": "cuda", "offload": {"parameters": True}}


def test_offloaded_parameters_and_what_is_theirs_are_on_the_host() -> None:
    spec = a_spec(parallelism=OFFLOADED, model={"dtype": "bfloat16"}, algorithm={"kl": {"placement": "loss"}})
    found = trainer_footprint(spec, sizes())
    on_host = {each.name for each in found.parts if each.is_on_host}

    assert {"weights", "float32 masters", "moments", "gradients", "reference"} <= on_host
    assert found.needed_on_device == parts_of(found)["gathered weights"]


def test_offloaded_activations_are_on_the_host() -> None:
    written: dict[str, Any] = {"parallelism": {"device": "cuda:0"}, "model": {"dtype": "bfloat16"}}
    there = trainer_footprint(a_spec(**written), sizes(num_hidden_layers=50))
    written["parallelism"]["offload"] = {"activations": True}
    moved = trainer_footprint(a_spec(**written), sizes(num_hidden_layers=50))

    assert moved.device_bytes + parts_of(moved)["offloaded activations"] == there.device_bytes
    assert parts_of(moved)["largest pass"] < parts_of(there)["largest pass"] // 5


def test_a_reward_models_trainer_has_no_output_layer() -> None:
    whole = sizes_of(CONFIG | {"tie_word_embeddings": False}, {**SHAPES, "lm_head.weight": (V, H)})
    spec = validate_spec(
        {
            "name": "job",
            "model": {"path": "nowhere"},
            "job": {"kind": "reward_model"},
            "data": {"path": "rows.jsonl"},
            "optimisation": {"steps": 5},
        }
    )

    assert parts_of(trainer_footprint(spec, whole))["weights"] == 4 * PARAMETERS


def test_an_engine_that_evaluates_a_finished_job_has_room_for_prompts_and_answers() -> None:
    spec = validate_spec(
        {
            "name": "job",
            "model": {"path": "nowhere"},
            "job": {"kind": "sft", "max_tokens": 100},
            "data": {"path": "rows.jsonl", "max_prompt_tokens": 16},
            "evaluation": {"path": "rows.jsonl", "max_new_tokens": 48},
            "reward": {"components": [{"kind": "numeric"}]},
            "rollout": {"engine": {"context_tokens": 2048}},
            "optimisation": {"steps": 5},
        }
    )

    assert longest_sample(spec) == 16 + spec.rollout.sampling.max_new_tokens
