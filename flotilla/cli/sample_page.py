"""Samples as one page of HTML without a script: what a terminal shows, and the images that the policy was shown."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from flotilla.cli.sample_text import describe
from flotilla.shared.vision.parts import uri_of

if TYPE_CHECKING:
    from flotilla.cli.sample_text import Sample
    from flotilla.shared.samples.reading import Picture

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


def page_of(samples: "Sequence[Sample]", images: "Mapping[str, Sequence[Picture]]") -> str:
    """Write samples whole, each with the images that it was shown, by the sample's id."""
    articles = []
    for sample in samples:
        pictures = _pictures(images.get(sample.id, ()))
        articles.append(f"<article>{pictures}<pre>{escape(describe(sample, is_whole=True).plain)}</pre></article>\n")
    return f"{HEAD}{''.join(articles)}</body></html>\n"


def _pictures(shown: "Sequence[Picture]") -> str:
    """Write images turn by turn; those of a prompt alone need no word."""
    found, last = "", 0
    for turn, data in shown:
        found += f"<p>Shown before turn {turn + 1}:</p>" if turn > last else ""
        found += _image(data, "image of the prompt" if not turn else f"image shown before turn {turn + 1}")
        last = turn
    return found


def _image(data: bytes, what: str) -> str:
    uri = uri_of(data)
    if uri is None:
        return f"<p>An image of {len(data)} bytes in a format that is not shown.</p>"
    return f'<img alt="{what}" src="{uri}">'
