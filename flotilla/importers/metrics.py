"""Metrics that users of other systems look for by name, and whether the fleet records them under it."""

from flotilla.importers.parameter import Parameter, Verdict

RECORDED = {
    "trainer/idle_ratio": "share of the time that the trainer waited for groups, per version",
    "rollouter/idle_ratio": "share of the time that the rollouts sampled nothing, per version",
    "fully_async/count/stale_samples_processed": "groups trained with a token of an older version, so far",
    "fully_async/count/stale_trajectory_processed": "trajectories trained with a token of an older version, so far",
    "fully_async/partial/total_partial_num": "trajectories of the step that span versions",
    "fully_async/partial/partial_ratio": "their share",
    "fully_async/partial/max_partial_span": "most versions that one spans",
}

METRICS: tuple[Parameter, ...] = (
    *(
        Parameter(name=name, verdict=Verdict.APPLIED, reason=f"recorded: {reason}", targets=(f"metric {name}",))
        for name, reason in RECORDED.items()
    ),
)  # fmt: skip
