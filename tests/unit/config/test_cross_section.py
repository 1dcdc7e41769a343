"""Rules across sections: each names both fields, and the entry has the path of one of them."""

from typing import Any

import pytest

from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.errors import InvalidSpec
from tests.unit.config.test_spec_text import a_document

SHORT = {"sampling": {"max_new_tokens": 16}, "engine": {"context_tokens": 64}}
CUSTOM = {"kind": "gdpo", "components": ["style"]}
FOUR_BITS = {"path": "model", "lora": {"rank": 4, "quantisation": {"dtype": "nf4"}}}


@pytest.mark.parametrize(
    ("sections", "path", "words"),
    [
        ({"algorithm": {"advantage": CUSTOM}}, "algorithm.advantage.components", "reward.components"),
        ({"rollout": {"group_size": 1}}, "rollout.group_size", "algorithm.advantage.kind grpo"),
        ({"rollout": {"agents": {}}, "algorithm": {"advantage": {"kind": "remax"}}}, "algorithm.advantage.kind",
         "rollout.agents"),
        ({"rollout": {"group_size": 1}, "algorithm": {"advantage": {"kind": "grpo_passk"}}}, "rollout.group_size",
         "algorithm.advantage.kind grpo_passk"),
        ({"optimisation": {"steps": 1, "shuffle": True}}, "optimisation.shuffle", "asynchrony.require_batches"),
        ({"rollout": SHORT, "evaluation": {"path": "x", "max_new_tokens": 64}}, "evaluation.max_new_tokens",
         "rollout.engine.context_tokens 64"),
        ({"rollout": SHORT, "reward": {"shaping": {"overlong": {"max_length": 64, "buffer": 8}}}},
         "reward.shaping.overlong", "rollout.sampling.max_new_tokens 16"),
        ({"rollout": SHORT, "reward": {"sample_mask": {"truncated": True, "max_length": 17}}},
         "reward.sample_mask.max_length", "rollout.sampling.max_new_tokens 16"),
        ({"asynchrony": {"redundant_groups": 4}}, "asynchrony", "set on_max_lag to drop"),
        ({"parallelism": {"tensor_parallel_size": 2}}, "parallelism", "raise resources.rollouts.min"),
        ({"parallelism": {"replicas": 2}}, "parallelism", "no effect while parallelism.ranks is 1"),
        ({"parallelism": {"ranks": 4, "replicas": 3}}, "parallelism", "does not divide 4 ranks"),
        ({"parallelism": {"ranks": 2, "replicas": 2}}, "parallelism", "does not divide 2 ranks"),
        ({"parallelism": {"ranks": 2, "device": "cuda:0"}}, "parallelism", "write cuda"),
        ({"parallelism": {"offload": {"optimiser": True}, "device": "cpu"}}, "parallelism", "has no effect while"),
        ({"parallelism": {"offload": {"parameters": True}, "device": "cuda"}}, "parallelism", "raise parallelism.r"),
        ({"parallelism": {"offload": {"parameters": True, "optimiser": True}, "device": "cuda", "ranks": 2}},
         "parallelism", "offload.optimiser has no effect beside offload.parameters"),
        ({"parallelism": {"offload": {"reference": True}, "device": "cuda"}}, "parallelism.offload.reference",
         "no reference model is used"),
        ({"parallelism": {"nodes": 2}}, "parallelism", "no effect while parallelism.ranks is 1"),
        ({"parallelism": {"mixed_precision": {}}}, "parallelism", "set model.dtype to bfloat16"),
        ({"parallelism": {"ranks": 2, "tensor_parallel": 2, "mixed_precision": {}}}, "parallelism", "raise par"),
        ({"parallelism": {"ranks": 2, "mixed_precision": {"reduce": "bfloat16"}},
          "model": {"path": "model", "dtype": "bfloat16"}}, "parallelism.mixed_precision", "reduce to float32"),
        ({"parallelism": {"offload": {"activations": True}, "device": "cpu"}}, "parallelism", "has no effect while"),
        ({"parallelism": {"device": "cpu"}, "model": {"path": "model", "attention": "flash_attention_2"}},
         "model.attention", "use cuda and bfloat16"),
        ({"parallelism": {"device": "cuda"}, "model": {"path": "model", "attention": "flash_attention_3",
                                                       "dtype": "float32"}}, "model.attention", "model.dtype float32"),
        ({"parallelism": {"ranks": 2, "sequence_parallel": 2}, "model": {"path": "model", "attention": "eager"}},
         "model.attention", "leave one of them out"),
        ({"parallelism": {"device": "cpu"}, "model": {"path": "model", "kernels": "liger"}}, "model.kernels", "auto"),
        ({"parallelism": {"ranks": 3, "nodes": 2}}, "parallelism", "parallelism.nodes 2 must"),
        ({"rollout": {"engine": {"kind": "sglang", "device": "cpu"}}, "resources": {"sharing": "time"}},
         "resources.sharing", "rollout.engine.kind sglang can on GPUs only"),
        ({"rollout": {"engine": {"kind": "sglang", "url": "http://a:1"}}, "resources": {"sharing": "time"}},
         "resources.sharing", "cannot report whether another client left it asleep"),
        ({"rollout": {"engine": {"kind": "sglang", "url": "http://10.0.0.5:1"}}, "resources": {"rollouts": {"min": 2}}},
         "resources.rollouts.min", "one server, which samples for one rollout"),
        ({"rollout": {"engine": {"kind": "vllm", "device": "cpu"}}, "resources": {"sharing": "time"}},
         "resources.sharing", "rollout.engine.kind vllm can on GPUs only"),
        ({"rollout": {"engine": {"kind": "vllm"}}, "resources": {"lending": {}}},
         "resources.lending", "rollout.engine.kind torch alone, not with vllm"),
        ({"rollout": {"engine": {"kind": "sglang", "url": "http://a:1"}}, "resources": {"lending": {}}},
         "resources.lending", "rollout.engine.kind torch alone, not with sglang"),
        ({"resources": {"lending": {}}}, "resources.lending", "set threads to a number, rollout.engine.device to cuda"),
        ({"rollout": {"engine": {"threads": 1}}, "parallelism": {"ranks": 2, "nodes": 2}, "resources": {"lending": {}}},
         "resources.lending", "parallelism.nodes is 2"),
        ({"rollout": {"engine": {"threads": 1}, "agents": {}}, "resources": {"lending": {}}},
         "resources.lending", "rollout.agents lets agents ask it at any time"),
        ({"rollout": {"engine": {"threads": 1}}, "resources": {"sharing": "time", "lending": {}}},
         "resources", "leave one of the two out"),
        ({"parallelism": {"sequence_parallel": 2}}, "parallelism", "no effect while parallelism.ranks is 1"),
        ({"parallelism": {"ranks": 4, "sequence_parallel": 3}}, "parallelism", "must divide parallelism.ranks 4"),
        ({"parallelism": {"ranks": 4, "replicas": 2, "sequence_parallel": 2}}, "parallelism", "must be 1 beside it"),
        ({"parallelism": {"tensor_parallel": 2}}, "parallelism", "no effect while parallelism.ranks is 1"),
        ({"parallelism": {"ranks": 4, "tensor_parallel": 3}}, "parallelism", "must divide parallelism.ranks 4"),
        ({"parallelism": {"ranks": 4, "replicas": 2, "tensor_parallel": 2}}, "parallelism", "4 ranks / 2"),
        ({"parallelism": {"ranks": 4, "sequence_parallel": 2, "tensor_parallel": 2}}, "parallelism", "use either it"),
        ({"parallelism": {"ranks": 2, "tensor_parallel": 2}, "model": {"path": "model", "lora": {"rank": 4}}},
         "parallelism.tensor_parallel", "model.lora puts others in their place"),
        ({"optimisation": {"steps": 1, "compile_layers": True}, "model": FOUR_BITS},
         "optimisation.compile_layers", "unpacks weights by others"),
        ({"parallelism": {"device": "cuda", "ranks": 2, "offload": {"parameters": True}}, "model": FOUR_BITS},
         "parallelism.offload.parameters", "are whole on each"),
        ({"parallelism": {"ranks": 4, "expert_parallel": 3}}, "parallelism", "must divide ranks / replicas 4"),
        ({"parallelism": {"ranks": 6, "expert_parallel": 3, "tensor_parallel": 2}}, "parallelism", "be a multiple of"),
        ({"parallelism": {"critic": {}}}, "parallelism", "no effect while parallelism.ranks is 1"),
        ({"parallelism": {"ranks": 2, "critic": {}}}, "parallelism.critic", "no effect without a critic"),
        ({"parallelism": {"ranks": 4, "critic": {"tensor_parallel": 3}}}, "parallelism",
         "parallelism.critic.tensor_parallel 3 must divide parallelism.ranks 4"),
        ({"parallelism": {"ranks": 4, "critic": {"replicas": 4}}}, "parallelism", "parallelism.critic.replicas 4 does"),
    ],
)  # fmt: skip
def test_what_cannot_go_together_is_refused(sections: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        validate_spec(a_document(**sections))

    assert [entry["path"] for entry in caught.value.errors] == [path]
    assert words in str(caught.value.errors[0]["allowed"])


@pytest.mark.parametrize(
    "sections",
    [
        {"rollout": {"group_size": 1}, "algorithm": {"advantage": {"kind": "grpo", "group_of_one": "raw"}}},
        {"rollout": {"group_size": 1}, "algorithm": {"advantage": {"kind": "reinforce_plus_plus"}}},
        {"rollout": {"agents": {}}, "algorithm": {"advantage": {"kind": "rloo"}}},
        {"asynchrony": {"redundant_groups": 4, "on_max_lag": "drop"}},
        {"rollout": {"agents": {}}, "evaluation": {"path": "heldout.jsonl", "every_versions": 2}},
        {"rollout": SHORT, "reward": {"shaping": {"overlong": {"max_length": 20, "buffer": 8}}}},
        {"rollout": SHORT, "reward": {"sample_mask": {"truncated": True, "max_length": 16}}},
        {"reward": {"components": [{"kind": "exact", "name": "style"}]}, "algorithm": {"advantage": CUSTOM}},
        {"rollout": {"engine": {"threads": 1}}, "resources": {"lending": {"when_waiting": 0.5, "over_steps": 8}}},
        {"rollout": {"engine": {"device": "cuda"}}, "resources": {"lending": {}}},
        {"parallelism": {"threads": 2, "device": "cuda:0"}},
        {"parallelism": {"ranks": 4, "replicas": 2, "device": "cuda"}},
        {"parallelism": {"ranks": 4, "sequence_parallel": 2}},
        {"parallelism": {"ranks": 8, "nodes": 2, "tensor_parallel": 4}},
        {"parallelism": {"ranks": 2, "nodes": 2}, "resources": {"sharing": "time"}},
        {
            "parallelism": {"device": "cuda", "offload": {"optimiser": True, "reference": True}},
            "algorithm": {"kl": {"placement": "loss"}},
        },
        {
            "parallelism": {"ranks": 2, "mixed_precision": {"reduce": "bfloat16"}},
            "model": {"path": "m", "dtype": "auto"},
        },
        {"parallelism": {"device": "cuda", "ranks": 2, "offload": {"activations": True, "parameters": True}}},
        {"parallelism": {"offload": {"activations": True}}, "resources": {"sharing": "time"}},
        {
            "model": {"path": "m", "attention": "flash_attention_2"},
            "parallelism": {"device": "cuda", "ranks": 2, "mixed_precision": {}},
        },
        {"parallelism": {"ranks": 2, "tensor_parallel": 2}},
        {"parallelism": {"ranks": 8, "replicas": 2, "tensor_parallel": 2, "expert_parallel": 4}},
    ],
)
def test_what_goes_together_is_valid(sections: dict[str, Any]) -> None:
    validate_spec(a_document(**sections))


@pytest.mark.parametrize(
    ("profiler", "sections", "named"),
    [
        ({"engine_versions": [1]}, {"rollout": {"group_size": 4, "engine": {"kind": "vllm"}}}, "the server's own"),
        ({"steps": [1], "ranks": [0, 2]}, {"parallelism": {"ranks": 2}}, "names rank 2, and parallelism.ranks is 2"),
    ],
)
def test_what_cannot_be_recorded_is_refused(profiler: dict[str, Any], sections: dict[str, Any], named: str) -> None:
    document = a_document() | sections | {"tracking": {"profiler": profiler}}

    with pytest.raises(InvalidSpec, match=named):
        validate_spec(document)
