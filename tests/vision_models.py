"""Tiny random vision-language models, with tokenizer and processor, and pictures to show them."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    InternVLConfig,
    InternVLForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from flotilla.shared.vision.layouts import ProcessedImage
from flotilla.shared.vision.tower import TOWER_PARTS

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 50, 220), "yellow": (230, 220, 40)}
SPECIAL = [
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
WORDS = [
    *COLOURS,
    "user",
    "assistant",
    "system",
    "which",
    "colour",
    "is",
    "this",
    "?",
    "first",
    "second",
    "a",
    "b",
    "c",
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m.role }} "
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
PATCH = 4
END = SPECIAL.index("<|im_end|>")
IMAGE_TOKEN = SPECIAL.index("<|image_pad|>")
KINDS = ("qwen2_5_vl", "qwen3_vl", "internvl")


def save_vision_model(
    directory: Path, kind: str = "qwen2_5_vl", *, seed: int = 0, hidden: int = 32, patch: int = PATCH, **text: Any
) -> Path:
    """Write a random model of 2 layers over a tower of 2; ``patch`` is the side of a patch in pixels."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": len(SPECIAL) + len(WORDS),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "eos_token_id": END,
        "pad_token_id": 0,
        "bos_token_id": None,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, hidden // 8 - 2]},
    } | text
    tower = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": hidden,
        "initializer_range": 0.1,
    }
    ids = {
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": SPECIAL.index("<|video_pad|>"),
        "vision_start_token_id": SPECIAL.index("<|vision_start|>"),
        "vision_end_token_id": SPECIAL.index("<|vision_end|>"),
        "tie_word_embeddings": True,
        "eos_token_id": END,
    }
    model: Any
    if kind == "internvl":
        return _save_tiles(directory, sizes, patch=patch)
    if kind != "qwen2_5_vl":
        # As published ones say: transformers goes by the kind, servers by this.
        sizes["rope_parameters"] |= {"mrope_interleaved": True}
    if kind.startswith("qwen3_5"):
        tower |= {"num_position_embeddings": 16}
        sizes |= {"head_dim": hidden // 4, "layer_types": ["linear_attention", "full_attention"]}
        sizes |= {f"linear_{each}": 8 for each in ("key_head_dim", "value_head_dim")}
        sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        sizes["rope_parameters"] |= {"partial_rotary_factor": 1.0}
        if kind == "qwen3_5":
            model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=sizes, vision_config=tower, **ids))
        else:
            sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
            sizes |= {"shared_expert_intermediate_size": 16}
            model = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=sizes, vision_config=tower, **ids))
    elif kind == "qwen2_5_vl":
        tower |= {"window_size": 4 * patch, "fullatt_block_indexes": [1]}
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=sizes, vision_config=tower, **ids))
    else:
        tower |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
        sizes["head_dim"] = hidden // 4
        if kind == "qwen3_vl":
            model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=sizes, vision_config=tower, **ids))
        else:
            sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
            config = Qwen3VLMoeConfig(text_config=sizes, vision_config=tower, **ids)
            model = Qwen3VLMoeForConditionalGeneration(config)
    model.save_pretrained(directory)
    _save_tokenizer(directory, TEMPLATE)
    described = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 4 * patch**2,
        "max_pixels": 256 * patch**2,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(described))
    return directory


def _save_tiles(directory: Path, sizes: dict[str, Any], *, patch: int) -> Path:
    """Write an InternVL of tiles of 4 x 4 patches, which make 4 tokens; an image has at most 6, beside the whole."""
    side = 4 * patch
    sizes |= {
        "model_type": sizes.get("model_type", "qwen2"),
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    tower = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "image_size": [side, side],
        "patch_size": [patch, patch],
        "initializer_range": 0.1,
    }
    config = InternVLConfig(
        text_config=sizes,
        vision_config=tower,
        image_token_id=IMAGE_TOKEN,
        image_seq_length=4,
        tie_word_embeddings=True,
        eos_token_id=END,
    )
    InternVLForConditionalGeneration(config).save_pretrained(directory)
    # As published ones: the template has one token where an image is, and the processor what stands around it.
    template = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|> ")
    around = ("<|vision_start|>", "<|vision_end|>")
    special = dict(zip(("start_image_token", "end_image_token"), around, strict=True))
    special |= {"context_image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    _save_tokenizer(directory, template, extra_special_tokens=special)
    described = {
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "size": {"height": side, "width": side},
        "crop_to_patches": False,
        "min_patches": 1,
        "max_patches": 6,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(described))
    (directory / "processor_config.json").write_text(
        json.dumps({"processor_class": "InternVLProcessor", "image_seq_length": 4})
    )
    return directory


def _save_tokenizer(directory: Path, template: str, **named: Any) -> None:
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>", **named)
    wrapped.add_special_tokens({"additional_special_tokens": SPECIAL[1:]})
    wrapped.chat_template = template
    wrapped.save_pretrained(directory)


def as_read(shown: Sequence[ProcessedImage], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Make what transformers' own forward takes of the pictures of a sequence; nothing where it has none."""
    if not shown:
        return {}
    pixels = {"pixel_values": torch.cat([torch.from_numpy(each.pixel_values) for each in shown])}
    if shown[0].grid is None:
        return pixels
    return pixels | {
        "image_grid_thw": torch.tensor([each.grid for each in shown]),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).int()[None],
    }


def is_of_tower(name: str) -> bool:
    """Whether a weight, by its name, computes images."""
    return any(f"{part}." in name for part in TOWER_PARTS)


def a_picture(
    colour: str | None = None, size: tuple[int, int] = (16, 16), *, seed: int = 0, form: str = "PNG"
) -> bytes:
    """Draw a picture of one colour, or of noise."""
    if colour is None:
        values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        image = Image.fromarray(values)
    else:
        image = Image.new("RGB", size, COLOURS[colour])
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()
