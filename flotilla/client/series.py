"""Names of the series that a run may record, so that one that has not begun is told from one that does not exist."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from flotilla.client.views import Metrics
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.schemas.experiment import MetricPoint

MAX_NEAR = 4
_WRITTEN = """
    admission/wait_seconds advantage/clip_fraction advantage/mean advantage/mean_square checkpoint/early
    checkpoint/retained_bytes checkpoint/write_seconds completion_tokens/max completion_tokens/mean
    correction/above_fraction correction/below_fraction correction/chi2_seq correction/chi2_token
    correction/effective_sample_size correction/k3_kl correction/kl correction/log_ppl_abs_diff
    correction/probability_difference correction/rejected_fraction correction/rejected_sequence_fraction
    correction/rollout_log_ppl correction/training_log_ppl correction/weight correction/weight_squared
    distillation/kl entropy evaluation/*/* evaluation/accuracy evaluation/best@* evaluation/grader/*
    evaluation/lag_versions evaluation/maj@* evaluation/mean@* evaluation/mean_completion_tokens
    evaluation/num_errors evaluation/num_graded_rows evaluation/num_rows evaluation/num_scored evaluation/pass@*
    evaluation/reward/* evaluation/reward_mean evaluation/source/*/* fully_async/count/stale_samples_processed
    fully_async/count/stale_trajectory_processed fully_async/partial/max_partial_span
    fully_async/partial/partial_ratio fully_async/partial/total_partial_num grad_norm grader/*/max grader/*/mean
    grader/*/min groups/dropped groups/failed groups/filtered groups/flat_fraction groups/in_step groups/trained
    held_out/loss held_out/perplexity held_out/preference/* kl/mean lag/max lag/mean lag/tokens/* learning_rate
    loss/kl loss/policy loss/supervised loss/total loss/value nll preference/accuracy preference/chosen
    preference/margin preference/rejected prompt_tokens/mean publication/commit_seconds publication/prepare_seconds
    publication/transfer_seconds ratio/approx_kl ratio/clip_fraction ratio/clip_fraction_lower ratio/mean
    reward/*/max reward/*/mean reward/*/min reward/*/std reward/max reward/mean reward/min reward/std
    reward/std_within_group rollouter/idle_ratio samples/in_step samples/lost_files samples/without_reward
    samples/written_bytes source/*/grader/*/mean source/*/reward/*/mean source/*/reward/mean source/*/reward/std
    time/checkpoint_seconds time/compute_seconds time/pace_seconds time/publication_seconds time/publish_seconds
    time/step_seconds time/wait_seconds tokens/generated tokens/resumed_in_step tokens/trained tokens/trained_in_step
    trainer/idle_ratio updates/in_step updates/skipped value/clip_fraction value/mean
"""
KNOWN = frozenset(_WRITTEN.split())
"""As in docs/metrics.md; a star stands for a name that a spec, a grader or the data gives."""


def is_known(name: str) -> bool:
    """Return whether a run may record a series of this name, whatever its spec and its graders are."""
    return any(fnmatchcase(name, known) for known in KNOWN)


def check_names(names: Sequence[str], seen: Collection[str]) -> None:
    """Check that each series is one that the run has, or may come to have.

    Args:
        names: that are asked for.
        seen: that have a value.

    Raises:
        InvalidRequest: there is no such series; the detail names those that are near.
    """
    for name in names:
        if name in seen or is_known(name):
            continue
        written = sorted({*seen, *(known for known in KNOWN if "*" not in known)})
        near = get_close_matches(name, written, n=MAX_NEAR, cutoff=0.6)
        same = [known for known in written if known.rpartition("/")[2] == name.rpartition("/")[2] and known not in near]
        meant = [*near, *same][:MAX_NEAR]
        hint = f"did you mean {' or '.join(meant)}?" if meant else "docs/metrics.md lists all names"
        raise InvalidRequest(f"no run has a metric {name!r}: {hint}")


async def read_series(
    read: Callable[[Mapping[str, Any]], Awaitable[list[MetricPoint]]], names: Sequence[str]
) -> Metrics:
    """Read series by their names, or all.

    Args:
        read: reads the values that a query selects.

    Raises:
        InvalidRequest: there is no such series.
    """
    points = Metrics(await read({"names": ",".join(names)} if names else {}))
    found = {point.name for point in points}
    strange = [name for name in names if name not in found and not is_known(name)]
    if strange:
        # All of a run is read for what is near, which only a wrong name costs.
        check_names(strange, {point.name for point in await read({})})
    return points
