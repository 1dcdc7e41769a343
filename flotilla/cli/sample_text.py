"""A sample as a person reads it: what was asked, what was written, what it came to and why."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from rich.text import Text

from flotilla.cli.reasons import meaning_of

if TYPE_CHECKING:
    from flotilla.shared.samples.reading import ReadSample
    from flotilla.shared.schemas.samples import SampleView

Sample: TypeAlias = "SampleView | ReadSample"
"""Of a gateway, or of a file, which is read without the libraries that a gateway's need."""

MOST_CHARACTERS = 1500
MOST_IN_A_LINE = 160
LABEL_WIDTH = 11


def describe(sample: Sample, *, is_whole: bool = False) -> Text:
    """Write a sample as one heading and its parts.

    Args:
        sample: of a gateway or of a file.
        is_whole: whether long texts are written to their end.
    """
    text = Text()
    text.append(f"{_where(sample)}  ", style="bold")
    text.append(_verdict(sample), style=f"bold {_colour(sample)}")
    text.append(f"  {_facts(sample)}\n", style="dim")
    parts = [
        ("prompt", sample.prompt, "cyan"),
        *_turns(sample),
        ("label", sample.label, ""),
        ("answer", sample.answer, ""),
        ("components", _numbers(sample.components), ""),
        ("metrics", _each(sample.metrics), ""),
        ("grader" if sample.num_sampled else "reason", sample.reason, "yellow"),
        ("group", f"{sample.kind}: {meaning_of(sample.ended)}" if sample.ended else None, "yellow"),
    ]
    for name, content, style in parts:
        if content is not None and content != "":
            _append(text, name, content if is_whole else shortened(content), style)
    return text


def _turns(sample: Sample) -> list[tuple[str, str, str]]:
    """List what was shown and what was written, turn by turn; of a single turn the completion."""
    turns = sample.turns
    if not turns:
        return [("completion", sample.completion, _colour(sample))]
    parts = []
    for number, turn in enumerate(turns, start=1):
        if turn["observation"]:
            parts.append(("", turn["observation"], "cyan"))
        earned = "" if turn["reward"] is None else f"   [{_number(turn['reward'])}]"
        parts.append((f"turn {number}", f"{turn['text']}{earned}", _colour(sample)))
    return parts


def in_a_line(sample: Sample) -> str:
    """Write what was asked, written and come to in one line."""
    # The last message is the question, without the marks that the template puts around it.
    asked = sample.messages[-1]["content"] if sample.messages else sample.prompt
    turns = sample.turns
    written = " | ".join(turn["text"] for turn in turns) if len(turns) > 1 else sample.completion
    return line_of(asked, written, sample.reward, sample.label)


def line_of(asked: object, written: object, reward: float | None, label: str | None) -> str:
    """Write a line of what was asked, written and come to."""
    prompt, completion = (" ".join(str(text).split()) for text in (asked, written))
    room = MOST_IN_A_LINE // 2
    known = f", label {label}" if label is not None else ""
    return f"{_end(prompt, room)} -> {_start(completion, room)}   (reward {_number(reward)}{known})"


def shortened(content: str, most: int = MOST_CHARACTERS) -> str:
    """Omit the middle of a long text, and note how much."""
    if len(content) <= most:
        return content
    half = most // 2
    return f"{content[:half]}\n[... {len(content) - 2 * half} characters more: --full ...]\n{content[-half:]}"


def _append(text: Text, name: str, content: str, style: str) -> None:
    first, *others = content.rstrip("\n").split("\n")
    text.append(f"  {name:<{LABEL_WIDTH}}", style="dim")
    text.append(f"{first}\n", style=style)
    for line in others:
        text.append(" " * (LABEL_WIDTH + 2) + line + "\n", style=style)


def _where(sample: Sample) -> str:
    step = "" if sample.step is None else f"step {sample.step}"
    kind = "" if sample.kind == "trained" else sample.kind
    return "  ".join(filter(None, (step, kind, f"problem {sample.row}", f"group {sample.group_id}.{sample.member}")))


def _verdict(sample: Sample) -> str:
    return f"reward {_number(sample.reward)}" if sample.status == "scored" else str(sample.status)


def _facts(sample: Sample) -> str:
    facts = [str(sample.finish_reason), f"{sample.num_sampled} tokens"]
    if sample.newest_version >= 0:  # Nothing was sampled of one that failed in a rollout.
        facts.append(f"version {sample.newest_version}")
    if sample.lag is not None:
        facts.append(f"lag {sample.lag}")
    if sample.advantage is not None:
        facts.append(f"advantage {sample.advantage:+.3f}")
    return ", ".join(facts)


def _colour(sample: Sample) -> str:
    if sample.reward is None:
        return "magenta"
    return "green" if sample.reward > 0 else "red"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}" if value == round(value) else f"{value:.3f}"


def _numbers(values: Mapping[str, float]) -> str:
    # One component alone is the reward, which the heading has.
    return _each(values) if len(values) > 1 else ""


def _each(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {_number(value)}" for name, value in values.items())


def _start(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _end(text: str, most: int) -> str:
    return text if len(text) <= most else f"...{text[-most:]}"
