"""ROLL's filters: of prompts by their rewards, and of tokens by how far trainer and sampler differ."""

import re
from typing import Any

from flotilla.importers.source import Source
from flotilla.importers.values import number, wrong

Fields = dict[str, Any]
Section = dict[str, Any]

OPTION = re.compile(r"^rewards\.(?P<domain>\w+)\.query_filter_config\.(?P<option>.+)$")
BOUNDS = {
    "mean_filter": {"filter_args.threshold_down", "filter_args.threshold_up"},
    "std_filter": {"filter_args.std_threshold"},
    "no_filter": set(),
}
"""Kinds of prompt filters, and the arguments that each reads."""

FILTERS = "train_infer_correction.filters"
SCOPES = {
    "token": {"scope": "token"},
    "segment": {"scope": "segment", "reduce": "mean"},
    "geometric": {"scope": "sequence", "reduce": "mean"},
    "sequence": {"scope": "sequence", "reduce": "sum"},
}
STATISTICS = {"ratio": ("ratio", 0.8, 1.2), "diff": ("probability_difference", -0.2, 0.2)}
"""What a filter of tokens tests: our name, and ROLL's bounds."""


def group_filter(source: Source) -> Fields:
    """Make the filter of prompts, where all domains that are written have the same one."""
    written: dict[str, dict[str, Any]] = {}
    domains: set[str] = set()
    for spelling, value in source.trees.get("rewards", {}).items():
        domains.add(spelling.removeprefix("rewards.").partition(".")[0])
        match = OPTION.match(spelling)
        if match:
            written.setdefault(match["domain"], {})[match["option"]] = value
    filters = {domain: _of_domain(source, domain, options) for domain, options in written.items()}
    made = [section for section in filters.values() if section is not None]
    if not made:
        return {}
    if len(made) < len(domains) or any(section != made[0] for section in made):
        domain = next(iter(domain for domain, section in filters.items() if section is not None))
        source.refuse_written(
            f"rewards.{domain}.query_filter_config.type",
            "prompts of all domains pass one filter: give every domain the same",
        )
        return {}
    return {"reward.group_filter": made[0]}


def _of_domain(source: Source, domain: str, options: dict[str, Any]) -> Section | None:
    prefix = f"rewards.{domain}.query_filter_config"
    kind = str(options.get("type", "no_filter"))
    if kind not in BOUNDS:
        source.refuse_written(f"{prefix}.type", f"{kind!r} is not offered here: use {', '.join(BOUNDS)}")
        return None
    for option in set(options) - {"type"} - BOUNDS[kind]:
        source.refuse_written(f"{prefix}.{option}", f"{kind} does not read it: leave it out")
    values = {
        option.rpartition(".")[2]: number(f"{prefix}.{option}", options[option])
        for option in BOUNDS[kind] & set(options)
    }
    if kind == "mean_filter":
        low, high = values.get("threshold_down", -1.0), values.get("threshold_up")
        return {"kind": "mean_in_range", "low": low, "high": high, "keep_single": True}
    threshold = values.get("std_threshold", -1.0)
    if kind == "no_filter" or threshold is None or threshold < 0:
        return None
    return {"kind": "spread_above", "statistic": "std", "threshold": threshold, "keep_single": True}


def rejections(source: Source) -> list[Section]:
    """Make the tests on tokens and sequences."""
    made: list[Section] = []
    written = source.value(FILTERS) or []
    if not isinstance(written, list):
        raise wrong(FILTERS, written, "a list of filters")
    for each in written:
        if not isinstance(each, dict) or str(each.get("agg_type", "token")) not in SCOPES:
            raise wrong(FILTERS, each, f"a filter whose agg_type is {', '.join(SCOPES)}")
        unknown = set(each) - {
            "agg_type",
            *(f"{name}_{end}" for name in STATISTICS for end in ("enabled", "low", "high")),
        }
        if unknown:
            raise wrong(FILTERS, each, f"a filter without {min(unknown)}, which ROLL's filters do not have")
        for name, (statistic, low, high) in STATISTICS.items():
            if each.get(f"{name}_enabled"):
                bounds = {
                    "lower": number(FILTERS, each.get(f"{name}_low", low)),
                    "upper": number(FILTERS, each.get(f"{name}_high", high)),
                }
                made.append({"statistic": statistic, **SCOPES[each.get("agg_type", "token")], **bounds})
    return made
