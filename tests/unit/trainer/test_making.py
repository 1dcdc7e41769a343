from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText

from flotilla.services.trainer.tiny_models.making import make_models, shrunk
from flotilla.services.trainer.tiny_models.recipe import ModelRecipe, Recipe
from flotilla.shared.vision.processor import ImageProcessor
from tests.vision_models import a_picture


def test_sizes_shrink_and_the_kind_stays() -> None:
    config = {"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
              "num_key_value_heads": 8, "tie_word_embeddings": False, "rms_norm_eps": 1e-6}  # fmt: skip

    found = shrunk(config, vocab_size=500)

    assert (found["hidden_size"], found["num_hidden_layers"]) == (64, 2)
    assert (found["num_attention_heads"], found["num_key_value_heads"]) == (4, 2)
    assert (found["model_type"], found["tie_word_embeddings"], found["rms_norm_eps"]) == ("qwen3", False, 1e-6)
    assert "vocab_size" not in found


def test_as_many_keys_as_heads_stay_as_many() -> None:
    found = shrunk({"num_attention_heads": 32, "num_key_value_heads": 32})

    assert found["num_attention_heads"] == found["num_key_value_heads"] == 4


def test_one_layer_of_each_kind_stays() -> None:
    found = shrunk({"layer_types": ["linear"] * 3 + ["full"] + ["linear"] * 3 + ["full"], "num_hidden_layers": 8})

    assert (found["layer_types"], found["num_hidden_layers"]) == (["linear", "full"], 2)


def test_axes_of_positions_divide_a_head() -> None:
    rope = {"rope_type": "default", "mrope_section": [16, 24, 24]}
    found = shrunk({"hidden_size": 4096, "num_attention_heads": 32, "rope_parameters": rope})

    assert sum(found["rope_parameters"]["mrope_section"]) == 64 // 4 // 2


def test_what_is_empty_stays_empty() -> None:
    assert shrunk({"q_lora_rank": None, "sliding_window": None}) == {"q_lora_rank": None, "sliding_window": None}


def test_a_small_model_of_tiles_has_a_processor_that_gives_an_image_its_tokens(tmp_path: Path) -> None:
    wanted = ModelRecipe(directory="model", family="internvl")
    make_models(Recipe(models=(wanted,), texts=("What is it?",), answers=("1",), max_tokens=128), tmp_path)

    shown = ImageProcessor.from_directory(tmp_path / "model").process(a_picture(size=(32, 16)))
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    features = model.base_model.get_image_features(torch.from_numpy(shown.pixel_values), return_dict=True).pooler_output

    assert (shown.rows, shown.columns) == (3, 4)
    assert features.shape[:2] == (3, 4)
