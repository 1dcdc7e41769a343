"""Names of the series that a run may record, to distinguish one that has not begun from one that does not exist."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

from flotilla.shared.errors import InvalidRequest

MAX_NEAR = 4
_WRITTEN = """
    admission/wait_seconds advantage/clip_fraction advantage/mean advantage/mean_square checkpoint/early
    checkpoint/retained_bytes checkpoint/write_seconds completion_tokens/max completion_tokens/mean
    correction/above_fraction correction/below_fraction correction/chi2_seq correction/chi2_token
    correction/effective_sample_size correction/k3_kl correction/kl correction/log_ppl_abs_diff
    correction/probability_difference correction/rejected_fraction correction/rejected_sequence_fraction
    correction/rollout_log_ppl correction/training_log_ppl correction/weight correction/weight_squared distillation/kl
    curriculum/*/rows engine_gap/* entropy exactness/difference exactness/unequal_fraction
    evaluation/*/* evaluation/accuracy evaluation/best@* evaluation/grader/* evaluation/lag_versions
    evaluation/maj@* evaluation/mean@* evaluation/mean_completion_tokens evaluation/num_errors
    evaluation/num_graded_rows evaluation/num_rows evaluation/num_scored evaluation/pass@* evaluation/reward/*
    evaluation/reward_mean evaluation/source/*/* fully_async/count/stale_samples_processed
    fully_async/count/stale_trajectory_processed fully_async/partial/max_partial_span
    fully_async/partial/partial_ratio fully_async/partial/total_partial_num grad_norm grader/*/max grader/*/mean
    grader/*/min groups/dropped groups/failed groups/filtered groups/flat_fraction groups/in_step groups/trained
    held_out/distillation/kl held_out/loss held_out/nll held_out/perplexity held_out/preference/* kl/mean
    lag/max lag/mean lag/tokens/* learning_rate
    loss/kl loss/policy loss/supervised loss/total loss/value memory/*/* memory_slope/*/* nll
    preference/accuracy preference/chosen
    preference/desirable_fraction preference/margin preference/reference_point preference/rejected
    prompt_tokens/mean publication/commit_seconds publication/prepare_seconds
    publication/transfer_seconds ratio/approx_kl ratio/clip_fraction ratio/clip_fraction_lower ratio/mean reward/*/max
    reward/*/mean reward/*/min reward/*/std reward/max reward/mean reward/min reward/std reward/std_within_group
    rollouter/cores rollouter/idle_ratio router/balance router/disagreement router/record_bytes_per_token router/z
    samples/in_step samples/lost_files samples/without_reward
    samples/written_bytes source/*/grader/*/mean source/*/reward/*/mean source/*/reward/mean source/*/reward/std
    time/checkpoint_seconds time/compute_cores
    time/compute_seconds time/device_seconds time/lent_seconds time/pace_seconds time/publication_seconds
    time/publish_seconds time/step_seconds time/wait_seconds tokens/generated tokens/resumed_in_step tokens/trained
    tokens/trained_in_step
    tokens/trained_in_step/*
    trainer/idle_ratio updates/in_step updates/skipped value/clip_fraction value/mean
"""
WILDCARDS = "*?["
KNOWN = frozenset(_WRITTEN.split())
"""As in docs/metrics.md; a star stands for a name that a spec, a grader or the data gives."""


def is_pattern(name: str) -> bool:
    """Return whether a name has wildcards."""
    return any(character in name for character in WILDCARDS)


def is_known(name: str) -> bool:
    """Return whether a run may record a series of this name, whatever its spec and its graders are."""
    return not is_pattern(name) and any(fnmatchcase(name, known) for known in KNOWN)


def check_names(names: Iterable[str], seen: Collection[str], *, patterns: bool = False) -> None:
    """Check that each series is one that the run has, or may come to have.

    Args:
        names: that are asked for.
        seen: that have a value.
        patterns: a name may have wildcards, and then match one name or several.

    Raises:
        InvalidRequest: there is no such series; the detail names those that are near.
    """
    for name in names:
        if name in seen or is_known(name):
            continue
        written = sorted({*seen, *(known for known in KNOWN if "*" not in known)})
        matching = [known for known in written if fnmatchcase(known, name)] if is_pattern(name) else []
        if matching and patterns:
            continue
        meant = (matching or _near(name, written))[:MAX_NEAR]
        hint = f"did you mean {' or '.join(meant)}?" if meant else "docs/metrics.md lists all names"
        exact = " (names are given in full here)" if matching else ""
        raise InvalidRequest(f"no run has a metric {name!r}{exact}: {hint}")


def _near(name: str, written: Collection[str]) -> list[str]:
    """Find what a wrong name may mean: names spelt alike, then those that end alike."""
    plain = "".join(character for character in name if character not in WILDCARDS)
    near = get_close_matches(plain, written, n=MAX_NEAR, cutoff=0.6)
    return near + [known for known in written if _end(known) == _end(plain) and known not in near]


def _end(name: str) -> str:
    return name.rpartition("/")[2]
