"""Tries out all that a spec names, before anything starts: files, rows, environments, prompts and graders."""

import asyncio
from dataclasses import dataclass, replace

from flotilla.services.gateway.datasets.finished import balance_of
from flotilla.services.gateway.preflight.inspection import Inspection, Rows, entry_of, inspect
from flotilla.services.gateway.preflight.prompts import Prompts, look_at_prompts, why_no_room
from flotilla.shared.config.sections.job import KtoConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import FlotillaError, Scalar
from flotilla.trial_episodes import TriedEpisodes, try_environments
from flotilla.trial_grades import try_graders


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of it.

    Attributes:
        rows: per source that could be read.
        prompts: as the model is given them; None where model or data cannot be read.
        lines: what environments and graders answered, for people.
        errors: one entry per thing that is wrong: path, value, what is allowed.
    """

    rows: tuple[Rows, ...]
    prompts: Prompts | None
    lines: tuple[str, ...]
    errors: tuple[dict[str, Scalar], ...]


async def try_out(spec: ExperimentSpec) -> Trial:
    """Open everything, reset and step environments, let graders grade: the spec's code is run, its URLs are called."""
    found = await asyncio.to_thread(inspect, spec)
    if spec.data.dump is not None:
        # Groups of a dump are answered and graded already: nobody is asked with them.
        found = replace(found, datasets={name: each for name, each in found.datasets.items() if name != "data"})
    errors = list(found.errors)
    episodes = await try_environments(spec, found.datasets)
    errors += episodes.errors
    prompts = await _prompts(spec, found, episodes, errors)
    lines = list(episodes.lines)
    if isinstance(spec.job, KtoConfig) and "data" in found.datasets:
        lines.append(balance_of(found.datasets["data"], spec.job))
    if spec.samples_answers:
        graded = {name: each for name, each in found.datasets.items() if spec.finished_job is None or name != "data"}
        tried = await try_graders(spec, graded)
        # A file that is not there is said once.
        missing = {entry["path"] for entry in errors}
        errors += [each for each in tried.errors if f"{each['path']}.path" not in missing]
        lines += tried.lines
    return Trial(found.rows, prompts, tuple(lines), tuple(errors))


async def _prompts(
    spec: ExperimentSpec, found: Inspection, episodes: TriedEpisodes, errors: list[dict[str, Scalar]]
) -> Prompts | None:
    if not found.has_model or not found.datasets:
        return None
    try:
        datasets = tuple(found.datasets.values())
        prompts = await asyncio.to_thread(look_at_prompts, spec, datasets, episodes.prompts)
    except FlotillaError as error:
        errors += error.errors or [entry_of("model.path", error)]
        return None
    reason = why_no_room(spec, prompts)
    if reason is not None:
        path = "rollout.engine.context_tokens"
        errors.append({"path": path, "value": spec.rollout.engine.context_tokens, "allowed": reason})
    return prompts
