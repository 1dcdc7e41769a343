"""What TRL takes by itself, by release: a script seldom says which one it is for, but its parameters often show it.

Read in the tags v0.17.0 to v1.9.0: trl/trainer/grpo_config.py, sft_config.py, dpo_config.py, reward_config.py and
base_config.py; what these leave alone is transformers' (src/transformers/training_args.py).
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from flotilla.importers.source import Source
from flotilla.importers.values import wrong

Release = tuple[int, int]
LATEST: Final[Release] = (1, 9)
FIRST: Final[Release] = (0, 17)
VERSION: Final = "trl_version"
BEFORE: Final[Mapping[str, tuple[tuple[Release, Any], ...]]] = {
    "temperature": (((0, 18), 0.9),),
    "beta of grpo": (((0, 19), 0.04),),
    "top_k": (((0, 18), 50),),
    "max_prompt_length": (((0, 26), 512),),
    "loss_type": (((0, 22), "bnpo"),),
    "gradient_checkpointing": (((0, 22), False),),
    "bf16": (((0, 19), False),),
    "vllm_importance_sampling_correction": (((0, 23), False),),
    "vllm_importance_sampling_mode": (((0, 26), "token_truncate"),),
    "vllm_importance_sampling_clip_max": (((0, 26), 2.0),),
    "learning_rate of reward": (((0, 24), 5e-5),),
    "truncation_mode of dpo": (((0, 29), "keep_end"),),
}
"""Defaults of releases before one; the last of TRL's are those of the tables."""
LAST_WITH: Final[Mapping[str, Release]] = {
    "max_prompt_length": (0, 27), "vllm_guided_decoding_regex": (0, 27), "max_seq_length": (0, 19),
    "rpo_alpha": (0, 28), "reference_free": (0, 28), "vllm_max_model_len": (0, 17),
}  # fmt: skip
"""The last release that had a parameter."""


def version(name: str, value: Any) -> Release:
    """Read a release, such as 0.24.0."""
    found = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.\w+)*", str(value).strip())
    release = (int(found[1]), int(found[2])) if found else (0, 0)
    if release < FIRST:
        raise wrong(name, value, f"a release of TRL from {FIRST[0]}.{FIRST[1]} on, such as 0.24.0")
    return release


def release_of(source: Source) -> Release:
    """Return the release that a launch file is for: the one that is named, else the last that its parameters allow."""
    if VERSION in source.given:
        found: Release = source.value(VERSION)
        return min(found, LATEST)
    spelled = {each.spelling for each in source.given.values()}
    known = {name: LAST_WITH[name] for name in spelled if name in LAST_WITH}
    if not known:
        return LATEST
    name = min(known, key=lambda each: (known[each], each))
    major, minor = known[name]
    source.note(f"read as TRL {major}.{minor}, the last release with {name}: {VERSION}=0.24.0, say, names another")
    return known[name]


def default(source: Source, name: str, trainer: str = "") -> Any:
    """Return a parameter's value, else what the file's release takes by itself."""
    if name in source.given:
        return source.value(name)
    release = release_of(source)
    for key in (f"{name} of {trainer}", name):
        for before, value in BEFORE.get(key, ()):
            if release < before:
                source.read.add(name)
                return value
    return source.value(name)
