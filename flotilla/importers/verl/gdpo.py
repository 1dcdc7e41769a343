"""verl's GDPO: the rewards that one function returns by key, each a component that is compared by itself."""

from typing import Any, Final

from flotilla.importers.adapter import adapter_name, verl_keys_adapter
from flotilla.importers.parameter import Parameter, applied, translated
from flotilla.importers.source import Source
from flotilla.importers.values import numbers, texts
from flotilla.importers.verl.algorithm import ALGORITHM, RM

Fields = dict[str, Any]

ESTIMATOR: Final = f"{ALGORITHM}.adv_estimator"
KEYS, WEIGHTS = f"{ALGORITHM}.gdpo_reward_keys", f"{ALGORITHM}.gdpo_reward_weights"
MANAGER: Final = f"{RM}.reward_manager"
TOTAL: Final = "score"
"""The reward of all, which verl reports; it teaches nothing here."""
BY_KEY = {ESTIMATOR: "gdpo", MANAGER: "gdpo", KEYS: ["accuracy", "format"]}

ROWS: tuple[Parameter, ...] = (
    translated(KEYS, ("algorithm.advantage.components", "reward.components"), texts,
               "what custom_reward_function returns besides score: each is asked for, and compared, by itself",
               example=["accuracy", "style"], default=None, context=BY_KEY),
    applied(WEIGHTS, "algorithm.advantage.weights", numbers, "factors of the normalised rewards", example=[1.0, 2.0],
            default=None, context=BY_KEY),
)  # fmt: skip


def by_key(source: Source) -> bool:
    """Return whether each reward is compared by itself."""
    return ESTIMATOR in source.system.parameters and source.value(ESTIMATOR) == "gdpo"


def estimator(source: Source) -> Fields:
    """Make the estimator; what it needs and the file lacks is refused."""
    keys, weights = source.value(KEYS) or [], source.value(WEIGHTS)
    if not keys or len(set(keys)) < len(keys) or TOTAL in keys:
        source.refuse(KEYS, f"gdpo needs the names of the rewards that it compares, each once, without {TOTAL}")
    if weights is not None and len(weights) != len(keys):
        source.refuse(WEIGHTS, f"one weight for each of {KEYS}")
        weights = None
    if source.value("custom_reward_function.path") is None:
        source.refuse(ESTIMATOR, "gdpo needs custom_reward_function, which returns the rewards by name")
    if not source.value(f"{ALGORITHM}.norm_adv_by_std_in_grpo"):
        source.refuse(f"{ALGORITHM}.norm_adv_by_std_in_grpo", "gdpo divides each reward by its group's deviation")
    if source.value(MANAGER) != "gdpo":
        source.refuse(MANAGER, "gdpo's rewards are kept apart by the manager gdpo")
    of_keys: Fields = {} if weights is None else {"weights": weights}
    return {"components": keys or [TOTAL], **of_keys, "epsilon": 1e-6, "group_of_one": "raw"}


def components(source: Source, path: str, function: str, more: Fields) -> Fields:
    """Make a component for each key, of factor 0 in the reward, and one for the score that verl reports."""
    file, keys = adapter_name(path, function), source.value(KEYS) or []
    source.files[file] = verl_keys_adapter(path, function, keys, more)
    total: Fields = {"kind": "custom", "name": TOTAL, "path": f"{file}:score"}
    parts = [
        {"kind": "custom", "name": key, "path": f"{file}:score_{number}", "weight": 0.0}
        for number, key in enumerate(keys)
    ]
    return {"reward.components": [total, *parts]}
