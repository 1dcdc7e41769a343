"""What rules of a spec would change of it, checked before anything starts and applied when one acts."""

from collections.abc import Mapping
from typing import Any

from flotilla.shared.config.load.live import changed_live, effect_of, refusal
from flotilla.shared.config.sections.rule import NextPoolConfig, RuleConfig, ScaleConfig, SetConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidSpec, Scalar


def check_rules(spec: ExperimentSpec) -> None:
    """Check that each rule has a name of its own, and could act now.

    Raises:
        InvalidSpec: one entry for the first rule that could not, with the reason.
    """
    names = [rule.name for rule in spec.rules]
    for number, rule in enumerate(spec.rules):
        if rule.name in names[:number]:
            raise _wrong(f"rules.{number}.name", rule.name, "a name of its own: another rule is called so")
        if rule.metric.startswith("evaluation/") and spec.evaluation is None:
            raise _wrong(f"rules.{number}.metric", rule.metric, "a series of training: nothing is evaluated")
        _check_effect(spec, rule, f"rules.{number}.then")


def _check_effect(spec: ExperimentSpec, rule: RuleConfig, where: str) -> None:
    effect = rule.then
    if isinstance(effect, SetConfig):
        keys = {f"{where}.values.{path}": path for path in effect.values}
    elif isinstance(effect, ScaleConfig):
        keys = {f"{where}.factors.{path}": path for path in effect.factors}
        bounds = {"at_least": effect.at_least, "at_most": effect.at_most}
        for name, paths in bounds.items():
            for path in paths:
                if path not in effect.factors:
                    raise _wrong(f"{where}.{name}.{path}", paths[path], "a key that has a factor")
    elif isinstance(effect, NextPoolConfig):
        keys = {}
    else:
        return
    for field, path in keys.items():
        if effect_of(path) is None:
            raise _wrong(field, path, f"a key that can change: {path} {refusal(path)}")
    try:
        values = values_of(spec, effect)
        if any(_value_at(spec, path) != value for path, value in values.items()):
            changed_with(spec, values)
    except InvalidSpec as error:
        raise _wrong(where, effect.kind, str(error)) from None


def values_of(spec: ExperimentSpec, effect: SetConfig | ScaleConfig | NextPoolConfig) -> Mapping[str, Any]:
    """List the values that an effect gives to keys, by their paths.

    Raises:
        InvalidSpec: a key that is multiplied has no number, or there is no next pool.
    """
    if isinstance(effect, NextPoolConfig):
        return _next_pool(spec)
    if isinstance(effect, SetConfig):
        return effect.values
    found: dict[str, float] = {}
    for path, factor in effect.factors.items():
        before = _value_at(spec, path)
        if isinstance(before, bool) or not isinstance(before, int | float):
            raise InvalidSpec(f"{path}: a number is wanted to multiply, the spec has {before}")
        value = max(before * factor, effect.at_least.get(path, float("-inf")))
        value = min(value, effect.at_most.get(path, float("inf")))
        found[path] = round(value) if isinstance(before, int) else value
    return found


def _next_pool(spec: ExperimentSpec) -> Mapping[str, Any]:
    if spec.data.curriculum is None:
        raise InvalidSpec("next_pool: the spec has no data.curriculum")
    weights = [pool.weight for pool in spec.data.curriculum.pools]
    now = weights.index(max(weights))
    if now + 1 == len(weights):
        raise InvalidSpec(f"next_pool: there is none after {spec.data.curriculum.pools[now].name}")
    if weights.count(weights[now]) > 1:
        raise InvalidSpec(
            f"next_pool: several pools have the largest weight, {weights[now]:g}, so that none is the one to go on "
            "from: give one pool the largest weight"
        )
    path = "data.curriculum.pools.{}.weight"
    return {path.format(now): weights[now + 1], path.format(now + 1): weights[now]}


def changed_with(spec: ExperimentSpec, values: Mapping[str, Any], base: ExperimentSpec | None = None) -> ExperimentSpec:
    """Give keys of an experiment at work other values.

    Raises:
        InvalidSpec: one of them cannot change, or its value is not allowed.
    """
    document: dict[str, Any] = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        place = document
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return changed_live(spec, document, base)


def _value_at(spec: ExperimentSpec, path: str) -> Any:
    found: Any = spec
    for name in path.split("."):
        if isinstance(found, tuple):
            found = found[int(name)] if name.isdecimal() and int(name) < len(found) else None
        else:
            found = getattr(found, name, None)
    return found


def _wrong(path: str, value: Any, allowed: str) -> InvalidSpec:
    entry: dict[str, Scalar] = {"path": path, "value": str(value), "allowed": allowed}
    return InvalidSpec(f"{path}: {allowed}", errors=[entry])
