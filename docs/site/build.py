"""Build the site: pages where they are in the repository, so that their links hold, and references made anew.

``make docs`` runs it. Nothing on a built page is loaded from elsewhere: fonts are the reader's own,
search runs in the browser.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from docs.site.references import cli_page, notebook_page, rest_page
from docs.site.sequences import with_pictures

ROOT = Path(__file__).parents[2]
TOP = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "AGENTS.md")
LINK = re.compile(r"\]\((?!https?:|#)([\w./-]+)(?:#[\w-]*)?\)")
LOADED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc="?(https?:[^"\s>]+)|<link\b[^>]*\bhref="?(https?:[^"\s>]+)"""
)
SHIM = "https://unpkg.com/iframe-worker/shim"
BUILD_SECONDS = 300


def pages(root: Path) -> Iterator[Path]:
    """List the Markdown of the repository that is a page, as paths below it."""
    yield from map(Path, TOP)
    found = [*root.glob("docs/**/*.md"), *root.glob("examples/*/README.md")]
    yield from sorted(path.relative_to(root) for path in found if path.relative_to(root).parts[1] != "site")


def lay_out(root: Path, target: Path) -> None:
    """Copy pages, and what they show or link to, to where they are in the repository.

    Raises:
        FileNotFoundError: a page links to what is not there.
    """
    for page in pages(root):
        text = (root / page).read_text(encoding="utf-8")
        write(target / page, with_pictures(text))
        for link in LINK.findall(text):
            linked = Path(os.path.relpath((root / page).parent / link, root))
            if linked.suffix != ".md" and not (root / linked).is_dir():
                copy(root, target, linked)
    for notebook in root.glob("examples/**/*.ipynb"):
        page = notebook.relative_to(root).with_suffix(".md")
        write(target / page, notebook_page(notebook.read_text(encoding="utf-8"), notebook.name))
        copy(root, target, notebook.relative_to(root))
    write(target / "docs" / "reference" / "rest.md", rest_page())
    write(target / "docs" / "reference" / "cli.md", cli_page())


def write(path: Path, text: str) -> None:
    """Write a page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def copy(root: Path, target: Path, path: Path) -> None:
    """Copy a file to the same place."""
    (target / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(root / path, target / path)


def make_whole(site: Path) -> list[str]:
    """Put the one script in that the builder leaves on another server; return what a page would still load from one."""
    shutil.copyfile(ROOT / "docs" / "site" / "iframe_worker.js", site / "assets" / "iframe_worker.js")
    remote = []
    for page in site.rglob("*.html"):
        depth = len(page.relative_to(site).parts) - 1
        text = page.read_text(encoding="utf-8").replace(SHIM, "../" * depth + "assets/iframe_worker.js")
        page.write_text(text, encoding="utf-8")
        remote += [f"{page.relative_to(site)}: {one or other}" for one, other in LOADED.findall(text)]
    return remote


def main() -> None:
    """Build ``build/docs/site``, or say what is wrong with which page."""
    place = ROOT / "build" / "docs"
    shutil.rmtree(place, ignore_errors=True)
    lay_out(ROOT, place / "pages")
    shutil.copyfile(ROOT / "docs" / "site" / "zensical.toml", place / "zensical.toml")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(place / "zensical.toml")]
    built = subprocess.run(
        command, env={**os.environ, "NO_COLOR": "1"}, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False
    )
    if built.returncode:
        said = re.sub(r"\x1b\[[0-9;]*m", "", built.stdout + built.stderr)
        sys.exit(said.partition("Traceback")[0] or said)
    if remote := make_whole(place / "site"):
        sys.exit("pages load from other servers:\n" + "\n".join(remote))
    sys.stdout.write(f"built {place / 'site' / 'index.html'}\n")


if __name__ == "__main__":
    main()
