from flotilla.services.trainer.tiny_models.making import shrunk


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
