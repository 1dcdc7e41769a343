"""A file of rows over HTTP, under the address policy that graders' URLs are under; so is each redirection."""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Sequence
from typing import IO, Final, cast
from urllib.parse import urljoin

import httpx

from flotilla.shared.environment.settings import GRADER_NETWORKS, IPNetwork
from flotilla.shared.errors import DataError, Unavailable
from flotilla.shared.net.absence import BUSY_STATUS
from flotilla.shared.net.client.address_policy import AddressRefused, permitted_address
from flotilla.shared.net.client.bearer_client import tls_context

WEB: Final = frozenset({"http", "https"})
PORTS: Final = {"http": 80, "https": 443}
MAX_REDIRECTIONS: Final = 5
SILENCE_SECONDS: Final = 30.0
FETCH_SECONDS: Final = 3600.0
MAX_BYTES: Final = 16 * 1024**3
MEMORY_BYTES: Final = 64 * 1024**2
"""What is kept in memory of a file; more is on disk."""


def fetch_from_web(url: str, networks: Sequence[IPNetwork]) -> IO[bytes]:
    """Fetch a file; blocks.

    Args:
        url: http or https.
        networks: that are not public, and may be asked all the same.

    Raises:
        DataError: the address is not allowed, there are too many redirections, or the server refuses.
        FileNotFoundError: there is nothing.
        OSError, httpx.HTTPError: it cannot be reached, or broke off.
    """
    end = time.monotonic() + FETCH_SECONDS
    with httpx.Client(follow_redirects=False, trust_env=False, timeout=SILENCE_SECONDS, verify=tls_context()) as client:
        at = url
        for _ in range(MAX_REDIRECTIONS + 1):
            answer = client.send(_request(client, at, url, networks), stream=True)
            with contextlib.closing(answer):
                if answer.is_redirect:
                    at = urljoin(at, answer.headers["location"])
                    continue
                if answer.status_code in {404, 410}:
                    raise FileNotFoundError(url)
                if not answer.is_success:
                    found = f"cannot read {url}: HTTP {answer.status_code}"
                    raise (Unavailable if answer.status_code in BUSY_STATUS else DataError)(found, path=url)
                # What a few bytes unpack to is the server's choice.
                if answer.headers.get("content-encoding", "identity").strip().lower() not in {"", "identity"}:
                    raise DataError(f"cannot read {url}: it comes compressed, though it was asked not to", path=url)
                return _content(answer, url, end)
    raise DataError(f"cannot read {url}: more than {MAX_REDIRECTIONS} redirections", path=url)


def _content(answer: httpx.Response, url: str, end: float) -> IO[bytes]:
    with contextlib.ExitStack() as unless_whole:
        content = unless_whole.enter_context(tempfile.SpooledTemporaryFile(MEMORY_BYTES))
        for chunk in answer.iter_raw():
            content.write(chunk)
            if content.tell() > MAX_BYTES:
                raise DataError(f"cannot read {url}: it has more than {MAX_BYTES} bytes", path=url)
            if time.monotonic() > end:
                raise Unavailable(f"cannot read {url}: it takes more than {FETCH_SECONDS:g} s", path=url)
        content.seek(0)
        unless_whole.pop_all()
        return cast(IO[bytes], content)


def _request(client: httpx.Client, at: str, url: str, networks: Sequence[IPNetwork]) -> httpx.Request:
    """Make the request to the address that was checked, so that a name cannot mean another one a moment later."""
    try:
        target = httpx.URL(at)
        host, port = target.raw_host.decode(), target.port or PORTS.get(target.scheme)
    except (httpx.InvalidURL, ValueError) as error:
        raise DataError(f"cannot read {url}: {error}", path=url) from None
    if port is None or not host:
        raise DataError(f"cannot read {url}: it leads to {at}, which is no address of the web", path=url)
    try:
        address = asyncio.run(permitted_address(host, port, private=networks))
    except AddressRefused:
        raise DataError(
            f"cannot read {url}: {host} is not a public address; the gateway's {GRADER_NETWORKS} may name its network",
            path=url,
        ) from None
    headers = {"Host": target.netloc.decode(), "Accept-Encoding": "identity"}
    pinned = target.copy_with(host=address)
    return client.build_request("GET", pinned, headers=headers, extensions={"sni_hostname": host})
