"""Rules across sections of a spec: what one says and another makes impossible, or without effect.

Each names both fields and the way out.
"""

from typing import TYPE_CHECKING

from shared.config.advantage import GdpoConfig
from shared.config.reward import CodeConfig, MatchConfig

if TYPE_CHECKING:
    from shared.config.spec import ExperimentSpec


def check_agreement(spec: "ExperimentSpec") -> None:
    """Check all rules.

    Raises:
        ValueError: the first that is broken.
    """
    _advantage(spec)
    _lengths(spec)
    _labels(spec)
    if spec.optimisation.shuffle and spec.asynchrony.require_batches == 1:
        raise ValueError(
            "optimisation.shuffle has no effect while asynchrony.require_batches is 1, since a step is then one "
            "mini-batch: remove shuffle, or raise require_batches"
        )


def _advantage(spec: "ExperimentSpec") -> None:
    advantage, size = spec.algorithm.advantage, spec.rollout.group_size
    if isinstance(advantage, GdpoConfig):
        names = [component.name or component.kind for component in spec.reward.components]
        unknown = [name for name in advantage.components if name not in names]
        if unknown:
            raise ValueError(
                f"algorithm.advantage.components names {unknown[0]!r}, which no entry of reward.components is called: "
                f"use {', '.join(names)}, or give a component that name"
            )
    compares = getattr(advantage, "group_of_one", None) == "zero" or advantage.kind == "grpo_passk"
    if size == 1 and compares:
        raise ValueError(
            f"rollout.group_size 1 leaves algorithm.advantage.kind {advantage.kind} nothing to compare, and so nothing "
            "to learn: raise group_size to at least 2, or use reinforce_plus_plus or gae"
        )


def _labels(spec: "ExperimentSpec") -> None:
    for number, component in enumerate(spec.reward.components):
        where = f"reward.components.{number}"
        if component.data_sources is not None and spec.data.data_source_column is None:
            raise ValueError(
                f"{where}.data_sources chooses by data source, and data.data_source_column is not set, so that nothing "
                "would be graded: name the column there, or remove data_sources"
            )
        if isinstance(component, MatchConfig | CodeConfig) and spec.data.label_column is None:
            raise ValueError(
                f"{where} is of kind {component.kind}, which compares with a label, and data.label_column is null: "  # type: ignore[union-attr]
                "name the column there"
            )


def _lengths(spec: "ExperimentSpec") -> None:
    most = spec.rollout.sampling.max_new_tokens
    wanted = spec.evaluation.max_new_tokens if spec.evaluation else None
    context = spec.rollout.engine.context_tokens
    if wanted is not None and wanted >= context:
        raise ValueError(
            f"evaluation.max_new_tokens {wanted} leaves no room for a prompt in rollout.engine.context_tokens "
            f"{context}: lower the first or raise the second"
        )
    overlong = spec.reward.shaping.overlong if spec.reward.shaping else None
    if overlong is not None and overlong.max_length - overlong.buffer >= most:
        raise ValueError(
            f"reward.shaping.overlong has no effect: its penalty starts after {overlong.max_length - overlong.buffer} "
            f"tokens, which rollout.sampling.max_new_tokens {most} lets no answer pass: lower overlong.max_length"
        )
    mask = spec.reward.sample_mask
    if mask is not None and mask.max_length is not None and mask.max_length > most:
        raise ValueError(
            f"reward.sample_mask.max_length {mask.max_length} is more than rollout.sampling.max_new_tokens {most}, so "
            "that no answer reaches it: lower the first"
        )
