"""How right the greedy answers of kept weights are: the same judge for whoever trained them."""

import json
from collections.abc import Mapping
from pathlib import Path

from benchmarks.plain_rewards import numeric
from flotilla.services.rollout.engines.base import GenerationRequest, SamplingParameters
from flotilla.services.rollout.engines.embedded.engine import TorchEngine
from flotilla.services.rollout.engines.embedded.outcomes import Generated
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.services.rollout.episodes.rendering import ChatRenderer
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.task import Message


def accuracies(
    kept: Mapping[int, Path], spec: ExperimentSpec, problems: Path, count: int, enough: float
) -> dict[int, float]:
    """Judge weights in the order of their steps, until they are right often enough.

    Args:
        kept: by step, a model's directory.
        spec: of the experiment; says how long an answer may be.
        problems: held-out rows with prompt and answer.
        count: how many of them.
        enough: the share of right answers after which no later weights are judged.
    """
    rows = [json.loads(line) for line in problems.read_text(encoding="utf-8").splitlines()[:count]]
    renderer = ChatRenderer.from_directory(str(spec.model.path))
    prompts = [renderer.prompt_ids((Message("user", row["prompt"]),)) for row in rows]
    sampling = SamplingParameters(spec.rollout.sampling.max_new_tokens, greedy=True)
    found: dict[int, float] = {}
    for step, directory in sorted(kept.items()):
        engine = TorchEngine(EngineSettings(str(directory), slots=128, context_tokens=256))
        for number, prompt in enumerate(prompts):
            engine.submit(GenerationRequest(str(number), prompt, (0,), sampling))
        right = 0.0
        while not engine.is_idle:
            for outcome in engine.step():
                if isinstance(outcome, Generated):
                    text = renderer.text(outcome.completions[0].token_ids.tolist())
                    right += numeric(text, str(rows[int(outcome.request_id)]["answer"]))
        found[step] = right / len(rows)
        if found[step] >= enough:
            break
    return found
