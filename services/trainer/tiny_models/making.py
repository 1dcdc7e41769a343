"""Makes the models of a trial: random weights, biased towards answers of which some are right and some are not.

Rewards of a random model are all alike, so that nothing could be learned from them. Here all embeddings have a part in
common, the last hidden states point along it, and the output layer's rows of a few tokens lean towards it: the end of
an answer, and the answers that the rows expect.

A config in Hugging Face format becomes tiny: its sizes change, the architecture stays.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from flotilla.services.trainer.tiny_models.recipe import ModelRecipe, Recipe
from flotilla.shared.errors import ModelError
from flotilla.shared.vision.kinds import GRID_MODELS, IMAGE_MODELS, TILE_MODELS

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
IMAGE: Final = "<|image_pad|>"
VISION: Final = ("<|vision_start|>", "<|vision_end|>", IMAGE, "<|video_pad|>")
VOCABULARY: Final = 1024
"""Tokens at most, beside those of answers."""
TEMPLATE: Final = (
    "{%- if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}"
    "<|im_end|>\n{% endif -%}"
    "{%- for message in messages -%}<|im_start|>{{ message.role + '\\n' }}"
    "{%- if message.content is string %}{{ message.content }}"
    "{%- elif message.content %}{% for part in message.content %}"
    "{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif -%}"
    "{% endfor %}{% endif -%}"
    "{%- for call in message.tool_calls or [] %}\n<tool_call>\n{{ (call.function or call) | tojson }}\n</tool_call>"
    "{% endfor -%}"
    "<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)
"""ChatML, with tools and images."""


def make_tokenizer(texts: Iterable[str], answers: Sequence[str], max_tokens: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer on the texts that will be met.

    Args:
        texts: prompts and what the fleet puts around them.
        answers: texts that become one token each.
        max_tokens: longest sequence that its model takes.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [PAD, TURN_START, TURN_END, *VISION]
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(answer, normalized=False) for answer in dict.fromkeys(answers)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START, *VISION],
        model_specific_special_tokens={"start_image_token": VISION[0], "end_image_token": VISION[1]},
        chat_template=TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=max_tokens,
    )


Section = Mapping[str, Any]
"""Of a config."""
Value = Any
HIDDEN, HEADS, KEY_VALUE_HEADS, HEAD_DIM = 64, 4, 2, 16
NUM_LAYERS: Final = 2
NUM_EXPERTS: Final = 4
PATCH: Final = 4
TILE: Final = 4 * PATCH
GRIDS: Final[Mapping[str, Any]] = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2,
    "min_pixels": 64, "max_pixels": 4096,
}  # fmt: skip
TILES: Final[Mapping[str, Any]] = {
    "image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": TILE, "width": TILE}, "max_patches": 4,
}  # fmt: skip
"""What their processors of images are made with."""
VISION_SECTIONS: Final = ("vision_config",)
SIZES: Final[Mapping[str, int]] = {
    "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KEY_VALUE_HEADS, "head_dim": HEAD_DIM,
    "query_pre_attn_scalar": HEAD_DIM, "max_window_layers": NUM_LAYERS, "sliding_window": 4096,
    # Latent attention of DeepSeek.
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": HEAD_DIM, "qk_rope_head_dim": HEAD_DIM,
    "v_head_dim": HEAD_DIM, "qk_head_dim": 2 * HEAD_DIM,
    # Experts.
    "num_experts": NUM_EXPERTS, "num_local_experts": NUM_EXPERTS, "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
    # Linear attention of Qwen3-Next.
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    # A tile of InternVL.
    "image_seq_length": 4,
}  # fmt: skip
"""What each is at most; what a config leaves empty stays so."""
TOWER: Final[Section] = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": PATCH, "window_size": 16,
    "out_hidden_size": HIDDEN, "num_position_embeddings": 16, "embed_dim": 32, "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0], "spatial_merge_size": 2, "temporal_patch_size": 2,
    "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": TILE,
}  # fmt: skip
"""The same of a tower for images."""


def shrunk(config: Section, **exact: int) -> dict[str, Value]:
    """Make a config tiny.

    Args:
        config: as config.json has it; sections for text and images are made tiny, too.
        exact: keys that get these values where they are, such as the vocabulary's size.
    """
    found = dict(config)
    for key, value in config.items():
        if key in VISION_SECTIONS and isinstance(value, Mapping):
            found[key] = {name: TOWER.get(name, each) for name, each in value.items()}
            # What Qwen2-VL's tower calls the width of the text's model.
            if "embed_dim" in value:
                found[key]["hidden_size"] = HIDDEN
        elif key == "text_config" and isinstance(value, Mapping):
            found[key] = shrunk(value, **exact)
        elif key in exact:
            found[key] = exact[key]
        elif key in SIZES and isinstance(value, int) and not isinstance(value, bool):
            found[key] = min(value, SIZES[key])
    if config.get("num_key_value_heads") == config.get("num_attention_heads") and "num_key_value_heads" in found:
        found["num_key_value_heads"] = found["num_attention_heads"]  # as many as before: all of them
    return _with_positions(_with_layers(found))


def _with_layers(config: dict[str, Value]) -> dict[str, Value]:
    """Keep one layer of each kind, two at least."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and kinds:
        chosen = [*dict.fromkeys(kinds)]
        chosen += chosen[-1:] * (NUM_LAYERS - len(chosen))
        config |= {"layer_types": chosen, "num_hidden_layers": len(chosen)}
    for name in ("mlp_only_layers", "no_rope_layers"):
        if isinstance(config.get(name), list):
            config[name] = [each for each in config[name] if isinstance(each, int) and each < 1]
    types = config.get("mlp_layer_types")
    if isinstance(types, list) and types:
        config["mlp_layer_types"] = [types[0], types[-1]][: config["num_hidden_layers"]]
    return config


def _with_positions(config: dict[str, Value]) -> dict[str, Value]:
    """Divide a head among the axes of positions, where there are several."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    is_grid = str(config.get("model_type", "")).removesuffix("_text") in GRID_MODELS and "text_config" not in config
    if not isinstance(rope, Mapping) or not ("mrope_section" in rope or is_grid):
        return config
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    half = int(head * rope.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1)) // 2
    side = max(half // 4, 0)
    name = "rope_scaling" if config.get("rope_scaling") and not config.get("rope_parameters") else "rope_parameters"
    config[name] = {
        "rope_type": "default",
        "rope_theta": 1e4,
        **rope,
        "mrope_section": [half - 2 * side, side, side],
    }
    return config


END_PROBABILITY: Final = 0.15
ANSWER_PROBABILITY: Final = 0.3
"""Of all answers together."""
COMMON: Final = 0.2
"""Each component of what embeddings have in common; beside it they are drawn with a hundredth of it upwards."""
SPREAD: Final = 0.05
MISSING: Final[Mapping[str, Mapping[str, int]]] = {"deepseek_v2": {"num_experts_per_tok": 2}}
"""What transformers' defaults of a family lack."""
DRAWN: Final = 0.1
"""Deviation of a reward model's head, so that its scores differ."""


def make_models(recipe: Recipe, folder: Path) -> None:
    """Write each model with the tokenizer into its directory.

    Raises:
        ModelError: transformers has no such architecture, or cannot make a small one of it.
    """
    tokenizer = make_tokenizer(recipe.texts, recipe.answers, recipe.max_tokens)
    for each in recipe.models:
        _make(each, recipe, tokenizer, folder / each.directory)


def _make(recipe: ModelRecipe, common: Recipe, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    torch.manual_seed(recipe.seed)
    config = _config(recipe, tokenizer, common.max_tokens)
    takes_images = config.model_type in IMAGE_MODELS
    kind: Any = AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
    kind = AutoModelForSequenceClassification if recipe.scores else kind
    try:
        model = kind.from_config(config, dtype=torch.float32).eval()
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError) as error:
        why = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ModelError(f"no small model of kind {recipe.family} can be made: {why[0]}") from error
    with torch.no_grad():
        if recipe.scores:
            model.score.weight.normal_(0.0, DRAWN)
        else:
            lean(model, tokenizer, common.answers)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    if takes_images:
        described = TILES if config.model_type in TILE_MODELS else GRIDS
        (directory / "preprocessor_config.json").write_text(json.dumps(described), encoding="utf-8")


def _config(recipe: ModelRecipe, tokenizer: PreTrainedTokenizerFast, max_tokens: int) -> PreTrainedConfig:
    if recipe.family not in CONFIG_MAPPING:
        raise ModelError(f"transformers has no architecture {recipe.family!r}: a trial needs one that it has")
    kind = CONFIG_MAPPING[recipe.family]
    ids = _ids(tokenizer)
    whole: dict[str, Any] = kind().to_dict() | {**MISSING.get(recipe.family, {}), **(recipe.config or {})}
    small = shrunk(whole, vocab_size=len(tokenizer), max_position_embeddings=max_tokens, **ids)
    small |= {name: value for name, value in ids.items() if name.startswith(("eos", "pad"))}
    for name in ("dtype", "torch_dtype", "quantization_config", "auto_map"):
        small.pop(name, None)
    if recipe.scores:
        small |= {"num_labels": 1}
    made: PreTrainedConfig = kind.from_dict(small)
    return made


def _ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    found = {name: tokenizer.convert_tokens_to_ids(token) for name, token in zip(names, VISION, strict=True)}
    end, pad = tokenizer.convert_tokens_to_ids(TURN_END), tokenizer.pad_token_id
    return {**found, "bos_token_id": pad, "eos_token_id": end, "pad_token_id": pad}


@torch.no_grad()
def lean(model: Any, tokenizer: PreTrainedTokenizerFast, answers: Sequence[str]) -> None:
    """Let a model end answers, and give some of those that are expected, more often than chance would."""
    embedded, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for weight in {id(each): each for each in (embedded, head)}.values():
        weight.normal_(0.0, SPREAD)
    embedded += COMMON
    ids = tokenizer("A question, and then the answer to it.", return_tensors="pt")["input_ids"]
    hidden = model.base_model(input_ids=ids).last_hidden_state[0].float()
    mean = hidden.mean(dim=0)
    direction = mean / mean.square().sum()
    num_tokens = head.shape[0]
    rest = 1.0 - END_PROBABILITY - (ANSWER_PROBABILITY if answers else 0.0)
    chosen: Mapping[str, float] = {answer: ANSWER_PROBABILITY / len(answers) for answer in answers}
    for token, probability in ((TURN_END, END_PROBABILITY), *chosen.items()):
        gain = math.log(probability * num_tokens / rest)
        head[tokenizer.convert_tokens_to_ids(token)] += gain * direction
    # Of images and turns it writes nothing by chance.
    for token in VISION:
        head[tokenizer.convert_tokens_to_ids(token)] -= 10.0 * direction
