"""The page in the package is what its source says, is small, needs nobody else's host, and holds no data."""

import gzip
import hashlib
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.page.files import NAMES
from flotilla.services.gateway.settings import GatewaySettings
from tests.unit.gateway.builders import a_gateway

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "page"
STATIC = ROOT / "services" / "gateway" / "page" / "static"
MOST_PACKED_BYTES = 300_000
MOST_FILE_BYTES = 1_000_000


def source_hash() -> str:
    """Hash name and content of every source, as page/build.mjs does."""
    names = [f"src/{path.name}" for path in (SOURCE / "src").iterdir()]
    found = hashlib.sha256()
    for name in sorted([*names, "build.mjs", "package-lock.json", "tsconfig.json"]):
        found.update(f"{name}\n".encode() + (SOURCE / name).read_bytes())
    return found.hexdigest()


async def get(path: str, **headers: str) -> httpx.Response:
    app = create_app(GatewaySettings(token="t", redis_url="redis://nowhere", data=Path("/nowhere")))

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"state": {"gateway": a_gateway()}}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(with_state), base_url="http://x") as client:
        return await client.get(path, headers={"Accept-Encoding": "identity", **headers})


def test_the_package_has_what_is_built_from_the_source() -> None:
    built = re.search('name="source" content="([0-9a-f]+)"', (STATIC / "index.html").read_text())

    assert built is not None
    assert built[1] == source_hash(), "run `make page` and commit what it writes"


def test_the_files_are_small() -> None:
    sizes = {name: (STATIC / name).read_bytes() for name, _ in NAMES.values()}

    assert all(len(content) < MOST_FILE_BYTES for content in sizes.values())
    assert sum(len(gzip.compress(content)) for content in sizes.values()) < MOST_PACKED_BYTES


def test_no_file_names_another_host() -> None:
    # Names of XML's vocabularies, and where a bundled package's warning leads: neither is fetched.
    known = re.compile(r"http://www\.w3\.org/")
    found = {
        url
        for path in STATIC.iterdir()
        if path.name != "licences.txt"
        for url in re.findall(r"https?://[^\s\"'`)]+", path.read_text(encoding="utf-8"))
        if not known.match(url)
    }

    assert found == set()


def test_the_document_has_no_script_and_no_style_of_its_own() -> None:
    text = (STATIC / "index.html").read_text()

    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", text) == []


@pytest.mark.parametrize(("path", "media_type"), [(path, media_type) for path, (_, media_type) in NAMES.items()])
async def test_a_file_needs_no_token_and_is_sent_once(path: str, media_type: str) -> None:
    whole = await get(path)
    packed = await get(path, **{"Accept-Encoding": "gzip"})
    known = await get(path, **{"If-None-Match": whole.headers["etag"]})

    assert whole.status_code == packed.status_code == 200
    assert whole.headers["content-type"] == media_type
    assert whole.content == packed.content == (STATIC / NAMES[path][0]).read_bytes()
    assert packed.headers["content-encoding"] == "gzip"
    assert (known.status_code, known.content) == (304, b"")
    for answer in (whole, packed, known):
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


async def test_nothing_else_below_the_page_is_open() -> None:
    for path in ("/page/../app.py", "/page/files.py", "/page/", "/index.html", "/v1/experiments"):
        assert (await get(path)).status_code == 401, path
