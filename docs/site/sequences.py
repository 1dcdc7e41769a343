"""Sequence diagrams as pictures: pages have them as Mermaid's text, and the site has no Mermaid (three megabytes).

What pages use of the language is read: participants, messages, notes, and ``alt`` and ``par`` with their branches.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

FENCED = re.compile(r"^```mermaid\nsequenceDiagram\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PARTICIPANT = re.compile(r"participant (\w+) as (.+)")
MESSAGE = re.compile(r"(\w+)(--?)>>(\w+): (.+)")
NOTE = re.compile(r"Note over (\w+): (.+)")
FRAME = re.compile(r"(alt|par|else|and|end)\b ?(.*)")
ROW, CHARACTER, MARGIN, LEAST = 34, 6.3, 16, 150
"""Pixels: a line of the diagram, a character, around the picture, between two participants."""


class UnknownLine(ValueError):
    """A line that is not of the part of the language that is read."""


@dataclass
class Drawing:
    """A diagram under way.

    Attributes:
        across: pixels of each participant's line from the left, by its short name.
        width: pixels.
        row: pixels from the top to where the next line goes.
        frames: pixels at which the open ``alt`` and ``par`` began.
    """

    across: dict[str, float]
    width: float
    row: float = MARGIN + 40
    parts: list[str] = field(default_factory=list)
    frames: list[float] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, anchor: str = "middle") -> None:
        self.parts.append(f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(words)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, more: str = "") -> None:
        self.parts.append(f'<line x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" {more}/>')

    def message(self, start: str, dash: str, end: str, words: str) -> None:
        """Draw an arrow with its words above it; one to itself is words beside the line."""
        at, to = self.across[start], self.across[end]
        dashed = 'stroke-dasharray="5 4"' if dash == "--" else ""
        if start == end:
            self.parts.append(
                f'<path d="M{at:.0f} {self.row - 4} h14 v14 h-12" fill="none" marker-end="url(#tip)" {dashed}/>'
            )
            self.text(at + 22, self.row + 7, words, "start")
        else:
            self.text((at + to) / 2, self.row - 5, words)
            self.line(at, self.row + 2, to, self.row + 2, f'marker-end="url(#tip)" {dashed}')
        self.row += ROW

    def frame(self, kind: str, words: str) -> None:
        """Begin, divide or close an ``alt`` or ``par``."""
        inset = MARGIN / 2 + 5 * max(len(self.frames) - (kind != "alt" and kind != "par"), 0)
        if kind == "end":
            top = self.frames.pop()
            size = (
                f'x="{inset:.0f}" y="{top:.0f}" width="{self.width - 2 * inset:.0f}" height="{self.row - top - 8:.0f}"'
            )
            self.parts.append(f'<rect {size} fill="none" stroke-opacity="0.4"/>')
        else:
            if kind in {"alt", "par"}:
                self.frames.append(self.row - 16)
            else:
                self.line(inset, self.row - 16, self.width - inset, self.row - 16, 'stroke-dasharray="2 3"')
            self.text(inset + 6, self.row, f"{kind if kind in {'alt', 'par'} else ''} [{words}]".strip(), "start")
        self.row += 8 if kind == "end" else ROW - 8


def with_pictures(page: str) -> str:
    """Replace the sequence diagrams of a page by pictures."""
    return FENCED.sub(lambda found: picture(found[1]), page)


def picture(text: str) -> str:
    """Draw a sequence diagram.

    Raises:
        UnknownLine: it has a line that is not read.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    names = dict(found.groups() for line in lines if (found := PARTICIPANT.fullmatch(line)))
    order = list(names)
    apart = max([LEAST, *spans(lines, order)])
    across = {name: MARGIN + 70 + number * apart for number, name in enumerate(order)}
    last = [len(found[4]) for line in lines if (found := MESSAGE.fullmatch(line)) and found[1] == found[3] == order[-1]]
    width = across[order[-1]] + max(90, *(30 + CHARACTER * length for length in [*last, 0]))
    drawing = Drawing(across, width)
    for line in lines:
        if found := MESSAGE.fullmatch(line):
            drawing.message(*found.groups())
        elif found := NOTE.fullmatch(line):
            drawing.text(across[found[1]], drawing.row + 4, f"({found[2]})")
            drawing.row += ROW
        elif found := FRAME.fullmatch(line):
            drawing.frame(*found.groups())
        elif not PARTICIPANT.fullmatch(line):
            raise UnknownLine(line)
    return _svg(drawing, names)


def spans(lines: list[str], order: list[str]) -> Iterator[float]:
    """List how far participants must be apart for each message's words to fit between them."""
    for line in lines:
        if found := MESSAGE.fullmatch(line):
            wide = (len(found[4]) + 4) * CHARACTER
            between = abs(order.index(found[1]) - order.index(found[3]))
            if between or found[1] != order[-1]:
                yield wide / between if between else wide + 10


def _svg(drawing: Drawing, names: dict[str, str]) -> str:
    height = drawing.row + MARGIN
    lines = [
        f'<line x1="{x:.0f}" y1="{MARGIN + 18}" x2="{x:.0f}" y2="{height - 8:.0f}" stroke-opacity="0.3"/>'
        for x in drawing.across.values()
    ]
    heads = [
        f'<text x="{x:.0f}" y="{MARGIN + 8}" text-anchor="middle" font-weight="bold">{escape(names[name])}</text>'
        for name, x in drawing.across.items()
    ]
    return "\n".join(
        [
            '<div class="sequence">',
            f'<svg viewBox="0 0 {drawing.width:.0f} {height:.0f}" width="{drawing.width:.0f}" role="img" '
            f'style="max-width: 100%; height: auto" font-size="12" stroke="currentColor">',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            '<path d="M0 0 L8 4 L0 8 z" fill="currentColor"/></marker></defs>',
            "<g>",
            *lines,
            "</g>",
            '<g fill="currentColor">',
            *(part.replace("<text ", '<text stroke="none" ') for part in [*heads, *drawing.parts]),
            "</g>",
            "</svg>",
            "</div>",
        ]
    )
