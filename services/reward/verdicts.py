"""What a judge is asked about a sample, and what its reply is worth."""

import math
import re

from flotilla.shared.config.sections.judge import PLACE, QuestionConfig
from flotilla.shared.schemas.grading import GradingSample


def question_of(sample: GradingSample, config: QuestionConfig) -> str:
    """Put a sample into the question, in one pass: placeholders inside it are not replaced."""
    values = {"prompt": sample.prompt, "response": sample.response, "label": sample.label or ""}
    if sample.messages:
        values["prompt"] = "\n\n".join(message.content for message in sample.messages)
    return PLACE.sub(lambda match: values[match[1]], config.template)


def reward_of(reply: str, config: QuestionConfig) -> float | None:
    """Return what the last verdict of a reply is worth; None where there is none."""
    found = [match[1] for match in re.finditer(config.pattern, reply) if match[1] is not None]
    return _worth(found[-1], config) if found else None


def no_verdict(reply: str) -> str:
    """Report that a reply has no verdict."""
    return f"no verdict in {reply[-200:]!r}"


def _worth(verdict: str, config: QuestionConfig) -> float | None:
    if config.verdicts is not None:
        by_name = {name.casefold(): reward for name, reward in config.verdicts.items()}
        return by_name.get(verdict.strip().casefold())
    try:
        number = float(verdict)
    except ValueError:
        return None
    is_within = math.isfinite(number) and config.low <= number <= config.high
    return (number - config.low) / (config.high - config.low) if is_within else None
