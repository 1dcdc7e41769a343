"""Whether answers nearly repeat each other: other words here and there, and the same text otherwise.

Of each text a sketch is kept: the smallest hashes of its runs of three words. The share that two sketches have in
common estimates the share of runs that the texts have in common.
"""

import zlib
from collections.abc import Sequence

RUN_WORDS = 3
SKETCH = 64
LONGEST_TEXT = 2000
"""Characters from the end: where an answer was led to. It bounds the time, about a millisecond for each text."""
FEWEST_WORDS = 20
"""A short answer to an easy question is what everybody says."""
MOST_MEMBERS = 32
"""Of a group that are compared, each with each: nothing else is graded meanwhile."""
ALIKE = 0.8
"""Share of common runs from which on two texts are alike."""

Sketch = frozenset[int]


def sketch_of(text: str) -> Sketch | None:
    """Sketch a text; None if it is too short to tell."""
    words = text[-LONGEST_TEXT:].split()
    if len(words) < FEWEST_WORDS:
        return None
    runs = {zlib.crc32(" ".join(words[at : at + RUN_WORDS]).encode()) for at in range(len(words) - RUN_WORDS + 1)}
    return frozenset(sorted(runs)[:SKETCH])


def likeness(first: Sketch, second: Sketch) -> float:
    """Estimate the Jaccard index of two texts' runs: 0 to 1.

    Source: Broder, On the Resemblance and Containment of Documents, SEQUENCES 1997.
    """
    smallest = sorted(first | second)[:SKETCH]
    return sum(each in first and each in second for each in smallest) / len(smallest)


def are_alike(first: Sketch, second: Sketch) -> bool:
    """Tell whether two texts are alike."""
    # What they share of the smallest hashes is at most what they share at all: of most pairs that is enough to know.
    return len(first & second) >= ALIKE * max(len(first), len(second)) and likeness(first, second) >= ALIKE


def alike_pair(texts: Sequence[str]) -> tuple[int, int] | None:
    """Find two members that are alike, where most members of a group are like another; None where they are not.

    Args:
        texts: of a group's members; the first ``MOST_MEMBERS`` stand for all, since which member comes first says
            nothing of it.
    """
    texts = texts[:MOST_MEMBERS]
    sketches = [sketch_of(text) for text in texts]
    alike: list[tuple[int, int]] = []
    for place, sketch in enumerate(sketches):
        if sketch is None:
            continue
        earlier = (at for at in range(place) if (other := sketches[at]) and are_alike(sketch, other))
        if (found := next(earlier, None)) is not None:
            alike.append((found, place))
    return alike[0] if len(texts) > 1 and len(alike) > (len(texts) - 1) / 2 else None
