"""``GET /`` and what it loads: files beside this module, the same for everybody, so that no token is wanted for them.

All data comes from ``/v1`` with the reader's own token. Nothing is loaded from another host, and no script or style is
inline.
"""

import gzip
import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from fastapi import FastAPI, Request, Response

NAMES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/page/app.css": ("app.css", "text/css; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""File and media type by path."""
PAGE_PATHS: Final = frozenset(NAMES)
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Looked at again each time, and not sent again: a new release is seen at once.
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file, as it is sent.

    Attributes:
        plain: its bytes.
        packed: the same, compressed with gzip.
        tag: its ``ETag``.
    """

    media_type: str
    plain: bytes
    packed: bytes
    tag: str

    @classmethod
    def read(cls, name: str, media_type: str) -> "PageFile":
        """Read a file of the package."""
        plain = (files(__package__) / "static" / name).read_bytes()
        return cls(media_type, plain, gzip.compress(plain, mtime=0), f'"{hashlib.sha256(plain).hexdigest()[:32]}"')

    def answer(self, request: Request) -> Response:
        """Send it, unless the caller has it."""
        headers = {**HEADERS, "ETag": self.tag}
        if self.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["Content-Encoding"] = "gzip"
            return Response(self.packed, media_type=self.media_type, headers=headers)
        return Response(self.plain, media_type=self.media_type, headers=headers)


def add_page(app: FastAPI) -> None:
    """Serve the page; each file is read when it is first asked for."""
    read: dict[str, PageFile] = {}

    # No coroutine: a file is read and packed on a thread.
    def file(request: Request) -> Response:
        path = request.url.path
        if path not in read:
            read[path] = PageFile.read(*NAMES[path])
        return read[path].answer(request)

    for path in NAMES:
        app.add_api_route(path, file, methods=["GET"], include_in_schema=False, response_class=Response)
