"""TRL's reward functions as graders: those of a script by adapter, those of trl.rewards by components of ours."""

import ast
import re
from typing import Any, Final

from flotilla.importers.adapter import adapter_name, trl_adapter
from flotilla.importers.source import Source
from flotilla.importers.spelling import experiment_name
from flotilla.importers.trl.written import Called, Function

Fields = dict[str, Any]
SOLUTION: Final = "solution"
"""The column that trl.rewards compares with (trl/rewards/accuracy_rewards.py)."""
THINK: Final = r"(?s)\A<think>(?!.*<think>).*?</think>"
"""What ``think_format_reward`` looks for (trl/rewards/format_rewards.py)."""
OF_A_RUN: Final = {
    "completion_ids": "token ids", "trainer_state": "the trainer's state", "environments": "environments",
    "images": "images",
}  # fmt: skip
"""What TRL passes and a grader here is not given."""
NOT_HERE: Final = {
    "get_cosine_scaled_reward": "no component scales by the cosine of the length: write it as a function",
    "get_repetition_penalty_reward": "here n-grams are of words: set reward.shaping.repetition, or write a function",
    "reasoning_accuracy_reward": "no component leaves out what was thought: use accuracy_reward, or write a function",
}


def rewards(source: Source) -> Fields:
    """Make the graders with their weights, and the penalty near the length limit."""
    listed = _listed(source)
    if not listed:
        source.lack("reward.components: give reward_funcs, or a grader of ours: --set 'reward.components=[...]'")
        return {}
    weights = source.value("reward_weights") or [1.0] * len(listed)
    if len(weights) != len(listed):
        source.refuse("reward_weights", f"{len(weights)} weights for {len(listed)} functions: give one for each")
        return {}
    label = SOLUTION if any(isinstance(each, Called) and each.name == "accuracy_reward" for each in listed) else None
    components: list[Fields] = []
    fields: Fields = {"data.label_column": label}
    for each, weight in zip(listed, weights, strict=True):
        if isinstance(each, Called) and each.name == "get_soft_overlong_punishment":
            fields |= _overlong(source, each, weight)
            continue
        component = _component(source, each, label)
        if component is not None:
            taken = [one["name"] for one in components]
            component["name"] = _unused(component["name"], taken)
            components.append(component | ({} if weight == 1 else {"weight": weight}))
    if not components and not source.refusals and "reward.shaping.overlong" in fields:
        components = [{"kind": "constant", "name": "constant"}]
    return fields | ({"reward.components": components} if components else {})


def _listed(source: Source) -> list[Any]:
    written, path = source.value("reward_funcs"), source.value("reward_model_name_or_path")
    listed = written if isinstance(written, list) else [written]
    return [each for each in (path, *listed) if each is not None]


def _unused(name: str, taken: list[str]) -> str:
    number = 1
    while (candidate := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    return candidate


def _overlong(source: Source, call: Called, weight: float) -> Fields:
    longest, buffer = call.argument(0, "max_completion_len"), call.argument(1, "soft_punish_cache")
    if not isinstance(longest, int) or not isinstance(buffer, int) or buffer < 1 or weight <= 0:
        source.refuse("reward_funcs", f"{call!r}: give both lengths as numbers above 0, and a weight above 0")
        return {}
    return {"reward.shaping.overlong": {"max_length": longest, "buffer": buffer, "factor": weight, "capped": True}}


def _component(source: Source, each: Any, label: str | None) -> Fields | None:
    if isinstance(each, str):
        return {"name": experiment_name(each.rpartition("/")[2]), "kind": "reward_model", "path": each}
    if isinstance(each, Called) and each.name == "accuracy_reward":
        return {"name": "accuracy_reward", "kind": "math"}
    if isinstance(each, Called) and each.name == "think_format_reward":
        return {"name": "think_format_reward", "kind": "regex", "pattern": THINK}
    if isinstance(each, Called):
        source.refuse("reward_funcs", f"{each.name}: {NOT_HERE.get(each.name, 'it is not offered here')}")
        return None
    if not isinstance(each, Function):
        source.refuse("reward_funcs", f"{each!r} is no function, and no path of a reward model")
        return None
    why = each.why or _asks_for(each.code)
    if why:
        source.refuse("reward_funcs", f"{each.name}: {why}")
        return None
    plain = each.name if re.fullmatch(r"[\w.]+", each.name) else "reward"
    name = _unused(plain.rpartition(".")[2], [one.removesuffix("_score_adapter.py") for one in source.files])
    file = adapter_name(f"{name}.py", "score")
    source.files[file] = trl_adapter(each.code, label)
    return {"name": name, "kind": "custom", "path": f"{file}:score"}


def _asks_for(code: str) -> str:
    """Return what a function asks for that only a run of TRL's has."""
    for node in ast.walk(ast.parse(code)):
        name = node.arg if isinstance(node, ast.arg) else node.value if isinstance(node, ast.Constant) else None
        if isinstance(name, str) and name in OF_A_RUN:
            return f"it reads {name}, and graders get no {OF_A_RUN[name]}"
    return ""
