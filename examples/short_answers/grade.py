"""A component of the reward: prefer short answers, among right ones."""

from typing import Any

LONG_CHARACTERS = 60
"""From here on an answer is not short at all."""


def short(sample: Any) -> dict[str, Any]:
    """Give 1 for an empty answer down to 0 for a long one, and 0 to what is wrong: else blurting would pay."""
    is_right = sample.response.rpartition("####")[2].strip() == sample.label
    reward = max(0.0, 1 - len(sample.response) / LONG_CHARACTERS) if is_right else 0.0
    return {"status": "scored", "reward": reward, "metrics": {"characters": len(sample.response)}}
