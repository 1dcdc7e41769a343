"""Which architecture a model has, by its config.json where it is on this disk, else by its name."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import JsonValue

USUAL: Final = "qwen2"
NAMES: Final[tuple[tuple[str, str], ...]] = (
    (r"internvl.*-hf", "internvl"),
    (r"qwen-?3[._]5.*a\d+b|qwen-?3[._]5.*moe", "qwen3_5_moe"),
    (r"qwen-?3[._]5", "qwen3_5"),
    (r"qwen-?3[-_]?next", "qwen3_next"),
    (r"qwen-?3[-_]?(vl|omni).*a\d+b", "qwen3_vl_moe"),
    (r"qwen-?3[-_]?vl", "qwen3_vl"),
    (r"qwen-?3.*(a\d+b|moe)|qwen-?3-?coder", "qwen3_moe"),
    (r"qwen-?3|qwq-?3", "qwen3"),
    (r"qwen-?2[._]5[-_]?vl|qwen25-?vl|ui-?tars-1|infigui", "qwen2_5_vl"),
    (r"qwen-?2[-_]?vl", "qwen2_vl"),
    (r"qwen-?(1[._]5|2)[-_]?.*moe|qwen-?2-57b", "qwen2_moe"),
    (r"distill-?qwen|qwen-?(1[._]5|2)|qwen25|qwq|distill_qwen", "qwen2"),
    (r"moonlight|kimi-?k2|deepseek-?(v3|r1)|dsv3|dspk|deepseek-?671b|(?<!\d)671b", "deepseek_v3"),
    (r"deepseek-?(coder-)?v2", "deepseek_v2"),
    (r"distill-?llama|deepseek-?(llm|math|coder)|llama|vicuna|tulu|zephyr-llama|yi-\d|smollm", "llama"),
    (r"mixtral", "mixtral"),
    (r"mistral|zephyr|ministral", "mistral"),
    (r"gemma-?3n?", "gemma3_text"),
    (r"gemma-?2", "gemma2"),
    (r"gemma", "gemma"),
    (r"seed[-_]?oss", "seed_oss"),
    (r"gpt[-_]?oss", "gpt_oss"),
    (r"glm-?4[._]5|glm-?4.*moe", "glm4_moe"),
    (r"glm-?4", "glm4"),
    (r"phi-?(3|4)", "phi3"),
    (r"olmo-?3", "olmo3"),
    (r"olmo-?2", "olmo2"),
    (r"minicpm", "minicpm"),
)
"""Of each the first whose pattern is in the name, without case."""


@dataclass(frozen=True, slots=True)
class Family:
    """What is known of a model's architecture.

    Attributes:
        name: ``model_type`` of transformers.
        config: of config.json; None where that is not on this disk.
        origin: what it was taken from, for people.
    """

    name: str
    config: dict[str, JsonValue] | None
    origin: str


def family_of(path: str, base: Path, *, with_images: bool = False) -> Family:
    """Find the architecture of a model.

    Args:
        path: as a spec has it: a directory or a name on the hub.
        base: folder that a relative path is taken from.
        with_images: whether prompts have images, where the name tells no architecture.
    """
    file = base / Path(path).expanduser() / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(config, dict) and isinstance(config.get("model_type"), str):
            return Family(config["model_type"], config, "its config.json")
    except (OSError, ValueError):
        pass
    last = path.rstrip("/").rpartition("/")[2]
    for text in (last, path):
        for pattern, name in NAMES:
            if re.search(pattern, text, re.IGNORECASE):
                return Family(name, None, "its name")
    usual = "qwen2_5_vl" if with_images else USUAL
    return Family(usual, None, "nothing: neither a config.json nor the name tells an architecture")
