"""Samples as one page of HTML without a script: what a terminal shows, and the images of the prompts."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from flotilla.cli.sample_text import describe

if TYPE_CHECKING:
    from flotilla.cli.sample_text import Sample

BEGINNINGS = ((b"\x89PNG", "png"), (b"\xff\xd8", "jpeg"), (b"GIF8", "gif"), (b"RIFF", "webp"), (b"BM", "bmp"))
"""First bytes of the formats that prompts may have."""
HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Samples</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
article { border-top: 1px solid #8886; padding: 1rem 0 }
pre { white-space: pre-wrap; overflow-wrap: anywhere }
img { max-width: 20rem; max-height: 20rem; margin-right: .5rem; border: 1px solid #8886; image-rendering: pixelated }
</style></head><body>
"""


def page_of(samples: "Sequence[Sample]", images: Mapping[str, Sequence[bytes]]) -> str:
    """Write samples whole, each with the images of its prompt, by the sample's id."""
    articles = []
    for sample in samples:
        pictures = "".join(map(_shown, images.get(sample.id, ())))
        articles.append(f"<article>{pictures}<pre>{escape(describe(sample, is_whole=True).plain)}</pre></article>\n")
    return f"{HEAD}{''.join(articles)}</body></html>\n"


def _shown(data: bytes) -> str:
    kind = next((kind for beginning, kind in BEGINNINGS if data.startswith(beginning)), None)
    if kind is None:
        return f"<p>An image of {len(data)} bytes in a format that is not shown.</p>"
    return f'<img alt="image of the prompt" src="data:image/{kind};base64,{b64encode(data).decode()}">'
