"""What routes' docstrings say that they raise, for the description: as answers, not as text of the description."""

import re
from collections import defaultdict

_HEADING = re.compile(r"^Raises:[ ]*\n", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(?=\S)", re.MULTILINE)
_STATUSES = re.compile(r"\s*\((\d{3}(?:, \d{3})*)(?:, [^)]*)?\)\.?$")


def without_raises(description: str) -> tuple[str, dict[int, str]]:
    """Take the section ``Raises`` out of a docstring.

    Args:
        description: with entries such as ``NotFound: there is no such experiment (404).``.

    Returns:
        What is left, and for each status why it is answered.
    """
    text, *sections = _HEADING.split(description, maxsplit=1)
    reasons: dict[int, list[str]] = defaultdict(list)
    for entry in _ENTRY.split(sections[0])[1:] if sections else ():
        reason = " ".join(entry.partition(":")[2].split())
        found = _STATUSES.search(reason)
        if found is not None:
            for status in found[1].split(", "):
                reasons[int(status)].append(reason[: found.start()])
    return text.strip(), {status: _sentence("; or ".join(each)) for status, each in reasons.items()}


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
