import json
from pathlib import Path

import pytest

from flotilla.trial_run.families import family_of


@pytest.mark.parametrize(
    ("path", "family"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2"),
        ("Qwen/Qwen3-8B", "qwen3"),
        ("Qwen/Qwen3-30B-A3B-Base", "qwen3_moe"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3_next"),
        ("Qwen/Qwen3.5-35B-A3B", "qwen3_5_moe"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2_5_vl"),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", "qwen3_vl_moe"),
        ("Qwen/Qwen1.5-MoE-A2.7B-Chat", "qwen2_moe"),
        ("OpenGVLab/InternVL3-8B-hf", "internvl"),
        ("meta-llama/Meta-Llama-3-8B", "llama"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2"),
        ("deepseek-ai/deepseek-llm-7b-chat", "llama"),
        ("moonshotai/Moonlight-16B-A3B", "deepseek_v3"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral"),
        ("google/gemma-2-2b-it", "gemma2"),
        ("/data/checkpoints/Qwen2.5-VL-3B/global_step_20", "qwen2_5_vl"),
    ],
)
def test_a_name_tells_the_architecture(path: str, family: str, tmp_path: Path) -> None:
    assert family_of(path, tmp_path).name == family


def test_the_config_on_the_disk_wins_over_the_name(tmp_path: Path) -> None:
    (tmp_path / "Qwen3-8B").mkdir()
    (tmp_path / "Qwen3-8B" / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_act": "silu"}))

    found = family_of("Qwen3-8B", tmp_path)

    assert (found.name, found.config) == ("llama", {"model_type": "llama", "hidden_act": "silu"})


def test_a_name_that_tells_nothing_is_said_to(tmp_path: Path) -> None:
    found = family_of("checkpoints/global_step_20", tmp_path)

    assert found.name == "qwen2"
    assert "nothing" in found.origin
