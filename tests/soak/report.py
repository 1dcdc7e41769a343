"""What a soak found: windows without and with hostile neighbours, and what the difference is."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

MOST_LOSS = 0.1
WORK = ("steps", "gradings", "answers")
"""Honest work: the trainer's steps, programs that were graded, answers of a grader."""
NAMES = {"steps": "training steps", "gradings": "gradings by programs", "answers": "answers of a grader"}


@dataclass
class Window:
    """A stretch of time.

    Attributes:
        is_hostile: whether others did what they could.
        seconds: its length.
        steps, gradings, answers: honest work that was done.
        programs, replies, requests: hostile ones that were dealt with.
    """

    is_hostile: bool
    seconds: float = 0.0
    steps: float = 0.0
    gradings: int = 0
    answers: int = 0
    programs: int = 0
    replies: int = 0
    requests: int = 0


@dataclass
class Report:
    """All that was seen.

    Attributes:
        level: isolation of the sandbox.
        false_grades: honest samples with a grade that is not theirs.
        absent: honest samples without a grade, by reason.
        failures: the sandbox's answers to honest programs that should have ended well, the first ones.
        rewarded: hostile programs or replies that became a reward.
        ledger: of the experiment, after its end.
        problem: why it ended early.
    """

    level: str = ""
    windows: list[Window] = field(default_factory=list)
    false_grades: list[str] = field(default_factory=list)
    absent: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    rewarded: list[str] = field(default_factory=list)
    ledger: Mapping[str, int | bool] = field(default_factory=dict)
    problem: str = ""

    def rate(self, name: str, *, is_hostile: bool) -> float:
        """Return a count per second over all windows of a kind."""
        chosen = [window for window in self.windows if window.is_hostile is is_hostile]
        seconds = sum(window.seconds for window in chosen)
        return sum(getattr(window, name) for window in chosen) / seconds if seconds else 0.0

    def loss(self, name: str) -> float:
        """Return which share of honest work hostile neighbours take; negative if there was more beside them."""
        alone = self.rate(name, is_hostile=False)
        return 1.0 - self.rate(name, is_hostile=True) / alone if alone else 1.0

    def paired_loss(self, name: str) -> float:
        """Return the median of the losses of neighbouring windows: what disturbs a few of them does not count."""
        losses = []
        for first, second in zip(self.windows[::2], self.windows[1::2], strict=False):
            alone, beside = (second, first) if first.is_hostile else (first, second)
            if done := getattr(alone, name):
                losses.append(1.0 - getattr(beside, name) / beside.seconds / (done / alone.seconds))
        return median(losses) if losses else 1.0

    @property
    def is_good(self) -> bool:
        """Whether honest work lost less than a tenth, and nothing was graded wrongly or miscounted."""
        is_exact = not (self.false_grades or self.rewarded or self.problem) and bool(self.ledger.get("balanced"))
        return is_exact and all(self.loss(name) < MOST_LOSS for name in WORK)


def order_of(windows: int) -> list[bool]:
    """Say which windows are hostile: in pairs whose order changes, so that a drift weighs on both alike."""
    return [number % 4 in (1, 2) for number in range(windows)]


BEGIN, END = "<!-- run: begin -->", "<!-- run: end -->"
"""What is between them in a page that exists is the latest run; the rest of it stays."""


def page_with(run: str, before: str) -> str:
    """Put the text of a run into a page, in the place of the one before; a page without a place is written."""
    if BEGIN not in before or END not in before:
        return f"# Soak: honest work beside hostile neighbours\n\n{BEGIN}\n{run}{END}\n"
    head, _, rest = before.partition(BEGIN)
    return f"{head}{BEGIN}\n{run}{END}{rest.partition(END)[2]}"


def markdown(report: Report, command: str, machine: str) -> str:
    """Write what a run found."""
    alone, beside = (sum(w.seconds for w in report.windows if w.is_hostile is kind) for kind in (False, True))
    lines = [
        f"    {command}",
        "",
        f"{machine}; isolation level {report.level}. {len(report.windows)} windows by turns, {alone:.0f} s alone and",
        f"{beside:.0f} s beside hostile programs, graders and clients, on one fleet in one run. Honest work is offered",
        "at the same rate in both.",
        "",
        "| honest work | alone, per second | beside, per second | loss | median loss of neighbouring windows |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in WORK:
        rates = [report.rate(name, is_hostile=kind) for kind in (False, True)]
        losses = f"{report.loss(name):.1%} | {report.paired_loss(name):.1%}"
        lines.append(f"| {NAMES[name]} | {rates[0]:.3f} | {rates[1]:.3f} | {losses} |")
    hostile = {name: sum(getattr(w, name) for w in report.windows) for name in ("programs", "replies", "requests")}
    absent = sum(report.absent.values())
    ledger = ", ".join(f"{name} {value}" for name, value in report.ledger.items())
    lines += [
        "",
        f"Hostile: {hostile['programs']} programs, {hostile['replies']} replies of graders and {hostile['requests']}",
        f"requests. {len(report.false_grades)} honest samples were graded wrongly, {absent} got no grade;",
        f"{len(report.rewarded)} hostile ones got a reward. The experiment's ledger at the end: {ledger}.",
    ]
    lines += ["", "What is asked of it:", "", *[f"- {line}" for line in verdicts(report)]]
    return "\n".join([*lines, ""])


def verdicts(report: Report) -> list[str]:
    """Say of each thing that is asked of a run whether it is so."""
    asked = [
        (f"{NAMES[name]} lose less than {MOST_LOSS:.0%}", report.loss(name) < MOST_LOSS, f"{report.loss(name):.1%}")
        for name in WORK
    ]
    asked += [
        ("no honest sample is graded wrongly", not report.false_grades, f"{len(report.false_grades)} are"),
        ("nothing hostile is rewarded", not report.rewarded, f"{len(report.rewarded)} are"),
        ("the ledger is balanced", bool(report.ledger.get("balanced")), str(dict(report.ledger))),
        ("the run lasts until its end", not report.problem, report.problem or "it does"),
    ]
    return [f"{'yes' if is_so else 'NO'}: {what} ({found})" for what, is_so, found in asked]


def write(report: Report, page: Path | None, figures: Path | None, command: str, machine: str) -> None:
    """Write the run into the page, and the figures, as far as they are wanted."""
    if page is not None:
        before = page.read_text(encoding="utf-8") if page.exists() else ""
        page.write_text(page_with(markdown(report, command, machine), before), encoding="utf-8")
    if figures is not None:
        losses = {name: report.loss(name) for name in WORK}
        figures.write_text(json.dumps({**asdict(report), "losses": losses, "is_good": report.is_good}, indent=1))


def line_of(window: Window, report: Report) -> str:
    """Say in a line what a window had."""
    kind = "hostile" if window.is_hostile else "alone"
    work = ", ".join(f"{getattr(window, name) / window.seconds:.2f} {name}/s" for name in WORK)
    dealt = f"{window.programs} programs, {window.replies} replies, {window.requests} requests"
    return f"{kind:8}{work}; {dealt}; {len(report.false_grades)} false grades, {sum(report.absent.values())} absent"


def losses_line(report: Report, names: Sequence[str] = WORK) -> str:
    """Say the losses in a line."""
    return ", ".join(f"{NAMES[name]} lose {report.loss(name):.1%}" for name in names)
