"""Findings of the training-health checks, and rules of a spec, for people."""

from collections.abc import Iterable, Sequence

from flotilla.shared.schemas.experiment import RuleView
from flotilla.shared.schemas.health import HealthFinding, SampleExcerpt

LONGEST_SHOWN = 160


def one_line(findings: Iterable[HealthFinding]) -> str:
    """Name findings in a line of progress; empty where there are none."""
    return "".join(f"  ! {each.check}: {each.seen}" for each in findings)


def names_of(findings: Sequence[HealthFinding]) -> str:
    """Name findings in a cell of a table."""
    return ", ".join(f"{each.check} (since step {each.since_step})" for each in findings)


def finding_lines(finding: HealthFinding) -> list[str]:
    """Write a finding with its advice, its command and its samples, one line each."""
    lines = [f"{finding.check} ({finding.component}, since step {finding.since_step}): {finding.seen}"]
    lines.append(f"  advice   {finding.advice}")
    lines += [f"  command  {finding.command}"] if finding.command else []
    for sample in finding.samples:
        lines += [f"  {name:<10} {text}" for name, text in _sample(sample)]
    return lines


def rule_lines(rule: RuleView) -> list[str]:
    """Write where a rule stands, then what it did, one line each."""
    points = f"{rule.num_met} of {rule.patience} points of {rule.metric} meet it"
    lines = [f"{rule.name}: {points}, acted {rule.num_fired} of {rule.times} times"]
    lines += [f"  step {done.step}, {done.value:.4g}: {done.did}" for done in rule.fired]
    return lines


def _sample(sample: SampleExcerpt) -> list[tuple[str, str]]:
    graded = "none" if sample.reward is None else f"{sample.reward:g}"
    parts = [f"reward {graded}"]
    parts += [f"second grade {sample.audit_reward:g}"] if sample.audit_reward is not None else []
    parts += [f"answer {_plain(sample.answer)}"] if sample.answer is not None else []
    parts += [f"label {_plain(sample.label)}"] if sample.label is not None else []
    parts += [f"ended by {sample.finish_reason}"] if sample.finish_reason else []
    parts += [f"reason: {_plain(sample.reason)}"] if sample.reason else []
    return [("prompt", _plain(sample.prompt)), ("completion", _plain(sample.completion)), ("grade", ", ".join(parts))]


def _plain(text: str | None) -> str:
    """Quote a text on one line, and cut its middle."""
    quoted = repr(text or "")
    half = LONGEST_SHOWN // 2
    return quoted if len(quoted) <= LONGEST_SHOWN else f"{quoted[:half]} ... {quoted[-half:]}"
