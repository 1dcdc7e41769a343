"""Stored specs of earlier releases, brought to what this release reads: a chain of pure functions.

A spec is stored whole, with every default, beside the revision of the schema that it was written under. It is never
rewritten: each reader applies the migrations that came since, and then validates it. A release that
refuses, renames or moves what an earlier one accepted adds a function here, which turns the old meaning into the new
form; where there is none that keeps the meaning, the spec is left as it is, and its experiment is shown as one that
cannot be used.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from flotilla.shared.config.base.addresses import is_loopback

Migration = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Makes the document of the next revision; leaves its argument alone."""


def _one_rollout_at_one_server(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Several rollouts took one server from each other: one that is not on the loopback address gets one rollout."""
    engine = _at(spec, "rollout", "engine")
    rollouts = _at(spec, "resources", "rollouts")
    url = engine.get("url")
    if (
        not isinstance(url, str)
        or is_loopback(urlsplit(url).hostname or "")
        or not isinstance(rollouts.get("min"), int)
    ):
        return spec
    resources = _at(spec, "resources")
    return {**spec, "resources": {**resources, "rollouts": {**rollouts, "min": min(rollouts["min"], 1)}}}


MIGRATIONS: Final[Sequence[Migration]] = (_one_rollout_at_one_server,)
"""The function at place N makes revision N + 1 of revision N."""
REVISION: Final = len(MIGRATIONS)
"""Of the specs that this release writes; 0 is what was written before revisions were counted."""


def migrated(spec: Mapping[str, Any], revision: int, migrations: Sequence[Migration] = MIGRATIONS) -> Mapping[str, Any]:
    """Bring a stored spec to the present revision.

    Args:
        spec: as it was stored.
        revision: under which it was written.
        migrations: the chain.

    Raises:
        ValueError: a later release wrote it.
    """
    if revision > len(migrations):
        raise ValueError(
            f"revision {revision} of the schema is of a later release; this one reads up to {len(migrations)}"
        )
    for migrate in migrations[revision:]:
        spec = migrate(spec)
    return spec


def _at(spec: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    found: Any = spec
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}
