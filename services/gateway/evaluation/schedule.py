"""When an evaluation is due: a pure function of versions."""


def due_version(
    *, policy_version: int, evaluated_version: int | None, every_versions: int | None, is_trained: bool
) -> int | None:
    """Find the version to evaluate now; None if none is due.

    The first evaluation is of whatever version is current when the experiment starts, the last of the last one. Between
    them, each time that ``every_versions`` more were published; one that took longer than that skips to the newest,
    since rollouts cannot go back.

    Args:
        policy_version: newest committed version.
        evaluated_version: version of the newest evaluation that ended; None before the first.
        every_versions: versions between two evaluations; None for the first and the last only.
        is_trained: whether training is over.
    """
    if evaluated_version is None:
        return policy_version
    if policy_version <= evaluated_version:
        return None
    if is_trained:
        return policy_version
    if every_versions is not None and policy_version // every_versions > evaluated_version // every_versions:
        return policy_version
    return None
