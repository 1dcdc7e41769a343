"""Makes the models of a trial: random weights, biased towards answers of which some are right and some are not.

Rewards of a random model are all alike, so that nothing could be learned from them. Here all embeddings have a part in
common, the last hidden states point along it, and the output layer's rows of a few tokens lean towards it: the end of
an answer, and the answers that the rows expect.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from flotilla.services.trainer.tiny_models.recipe import ModelRecipe, Recipe
from flotilla.services.trainer.tiny_models.shrinking import PATCH, shrunk
from flotilla.services.trainer.tiny_models.tokenizer import TURN_END, VISION, make_tokenizer
from flotilla.shared.errors import ModelError
from flotilla.shared.vision.kinds import GRID_MODELS

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
    takes_images = config.model_type in GRID_MODELS
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
        described = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": PATCH,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "min_pixels": 64,
            "max_pixels": 4096,
        }
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
