"""Which variables our programs read: whatever starts them may set these, and no others of our prefix."""

import functools
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[3]
FILE_OF = re.compile(r"(FLOTILLA_(?:TOKEN|SERVICE_TOKEN|REDIS_URL|DATABASE_URL))_FILE")


@functools.cache
def _sources() -> str:
    return "\n".join(
        path.read_text(encoding="utf-8")
        for top in ("shared", "services", "flotilla")
        for path in sorted((ROOT / top).rglob("*.py"))
        if path.is_relative_to(ROOT / top)
    )


def unread_variables(names: Iterable[str]) -> list[str]:
    """List those of our prefix that no program reads."""
    unread = []
    for name in sorted(set(names)):
        secret = FILE_OF.fullmatch(name)
        if name.startswith("FLOTILLA_") and f'"{secret[1] if secret else name}"' not in _sources():
            unread.append(name)
    return unread
