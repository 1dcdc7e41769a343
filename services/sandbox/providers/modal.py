"""Boxes that are sandboxes of Modal, asked by its own client: its API is that client's, and documented as such.

An image is a container image, of which Modal builds one of its own at its first use; ``im-...`` is an existing one.
The client repeats by itself what may be repeated, with one idempotency key; here each call is bounded.

Source: the package ``modal``, as of 1.6.4.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import ClassVar, Final

import modal
from modal import exception
from modal.config import config
from modal.stream_type import StreamType

from flotilla.services.sandbox.providers.base import MARK, MARKED, Box, Cause, Found, ProviderFailed, Wanted

APP: Final = "flotilla"
"""Of whose sandboxes all boxes are; made at the first use."""
BUILT: Final = "im-"
CALL_SECONDS: Final = 60.0
"""For one call and its repetitions."""
BUILD_SECONDS: Final = 600.0
"""For an image that is built first."""
CREATE_SECONDS: Final = 60.0
ATTEMPTS: Final = 2
"""Of a call without an answer: made twice, one of the sandboxes is orphaned, and is found by its label."""
SLACK_SECONDS: Final = 5.0
MEBIBYTE: Final = 1 << 20
AT_A_TIME: Final = 16
"""Sandboxes whose labels are asked for at a time."""
ABSENT: Final = 3
"""Exit code where there is no file."""
CAUSES: Final[Sequence[tuple[type[Exception], Cause]]] = (
    (exception.ImageBuildError, Cause.REFUSED),
    (exception.AuthError, Cause.REFUSED),
    (exception.PermissionDeniedError, Cause.REFUSED),
    (exception.VersionError, Cause.REFUSED),
    (exception.UnimplementedError, Cause.REFUSED),
    (exception.InvalidError, Cause.REFUSED),
    (exception.NotFoundError, Cause.LOST),
    (exception.SandboxTerminatedError, Cause.LOST),
    (exception.SandboxTimeoutError, Cause.LOST),
    (exception.TimeoutError, Cause.LATE),
    (exception.ResourceExhaustedError, Cause.BUSY),
    (exception.ConnectionError, Cause.ABSENT),
)
"""Errors of the client, and why it failed; any other is a failure of Modal's."""


class Modal:
    """A workspace at Modal.

    Args:
        url: of its API; None: the one that the client knows.
        token: of the workspace, its id and its secret.
        owner: the owner of its boxes.
    """

    kind: ClassVar[str] = "modal"

    def __init__(self, url: str | None, token: tuple[str, str], owner: str) -> None:
        self._url, self._token, self._owner = url, token, owner
        self._opening = asyncio.Lock()
        self._opened: tuple[modal.Client, modal.App] | None = None
        self._images: dict[str, modal.Image] = {}
        self._sandboxes: dict[str, modal.Sandbox] = {}
        self._labels: dict[str, dict[str, str]] = {}

    async def create(self, wanted: Wanted) -> Box:
        """Make a sandbox of an image; see ``Provider.create``."""
        labels = wanted.labels(self._owner)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._created(wanted, labels)
            except ProviderFailed as error:
                if error.cause is not Cause.LATE or attempt == ATTEMPTS:
                    raise
        raise AssertionError("the last attempt ends with a sandbox or fails")

    async def _created(self, wanted: Wanted, labels: dict[str, str]) -> Box:
        seconds, memory = math.ceil(wanted.lifetime_seconds), math.ceil(wanted.memory_bytes / MEBIBYTE)
        async with _asking(BUILD_SECONDS):
            client, app = await self._workspace()
            image = await self._image(wanted.image, client, app)
        ends_at = time.monotonic() + wanted.lifetime_seconds
        async with _asking(CREATE_SECONDS):
            # Without a name, which would be refused where it was taken by an attempt whose answer was lost.
            sandbox = await modal.Sandbox.create.aio(
                "sleep",
                str(seconds),
                app=app,
                client=client,
                image=image,
                tags=labels,
                timeout=seconds,
                cpu=(wanted.processors, wanted.processors),
                memory=(memory, memory),
                block_network=not wanted.has_network,
            )
        self._sandboxes[sandbox.object_id], self._labels[sandbox.object_id] = sandbox, labels
        return Box(sandbox.object_id, wanted.name, wanted.image, ends_at)

    async def _workspace(self) -> tuple[modal.Client, modal.App]:
        """Connect and find the app, once."""
        async with self._opening:
            if self._opened is None:
                logging.getLogger("hpack").setLevel(logging.INFO)  # it would log each header, the token's too
                if self._url is not None:
                    config.override_locally("server_url", self._url)
                client = await modal.Client.from_credentials.aio(*self._token)
                try:
                    app = await modal.App.lookup.aio(APP, client=client, create_if_missing=True)
                except BaseException:
                    await client.close.aio()
                    raise
                self._opened = client, app
        return self._opened

    async def _image(self, name: str, client: modal.Client, app: modal.App) -> modal.Image:
        """Name an image that is built; it stays built."""
        if name.startswith(BUILT):
            return modal.Image.from_id(name, client=client)
        if name not in self._images:
            try:
                self._images[name] = await modal.Image.from_registry(name).build.aio(app)
            except exception.ImageBuildError as error:
                raise ProviderFailed(Cause.REFUSED, f"modal has no image of {name!r}: {_sentence(error)}") from error
        return self._images[name]

    async def _sandbox(self, box_id: str) -> modal.Sandbox:
        """Give the handle of a sandbox, also of one that another service made."""
        if box_id in self._sandboxes:
            return self._sandboxes[box_id]
        client, _ = await self._workspace()
        return await modal.Sandbox.from_id.aio(box_id, client=client)

    async def execute(self, box: Box, script: str, seconds: float) -> int:
        """Run a script by its worker; see ``Provider.execute``."""
        async with self._in_box(box, seconds + SLACK_SECONDS) as sandbox:
            process = await sandbox.exec.aio(
                "sh", "-c", script, stdout=StreamType.DEVNULL, stderr=StreamType.DEVNULL, timeout=math.ceil(seconds)
            )
            code = await process.wait.aio()
            if code < 0:
                raise ProviderFailed(Cause.LATE, f"modal ended a command after {seconds:g} s")
        return int(code)

    async def write(self, box: Box, path: str, content: bytes) -> None:
        """Write a file; see ``Provider.write``."""
        async with self._in_box(box, CALL_SECONDS) as sandbox:
            await sandbox.filesystem.write_bytes.aio(content, path)

    async def read(self, box: Box, path: str, max_bytes: int) -> bytes | None:
        """Read a file; see ``Provider.read``. The client's own call has no bound of its length."""
        script = f'[ -f "$1" ] || exit {ABSENT}; exec head -c {max_bytes + 1} "$1"'
        async with self._in_box(box, CALL_SECONDS) as sandbox:
            process = await sandbox.exec.aio(
                "sh", "-c", script, "sh", path, stderr=StreamType.DEVNULL, timeout=math.ceil(CALL_SECONDS), text=False
            )
            content = bytes(await process.stdout.read.aio())
            code = await process.wait.aio()
            if code not in {0, ABSENT}:
                raise ProviderFailed(Cause.FAILED, f"modal could not read a file (exit code {code})")
        return content if code == 0 and len(content) <= max_bytes else None

    @asynccontextmanager
    async def _in_box(self, box: Box, seconds: float) -> AsyncIterator[modal.Sandbox]:
        """Ask something of a sandbox; a failure whose sandbox has ended is that.

        Raises:
            ProviderFailed: it failed, or the sandbox is gone.
        """
        try:
            async with _asking(seconds):
                yield await self._sandbox(box.id)
        except ProviderFailed:
            async with _asking(CALL_SECONDS):
                ended = await (await self._sandbox(box.id)).poll.aio()
            if ended is not None:
                raise ProviderFailed(Cause.LOST, f"the sandbox of modal is gone (exit code {ended})") from None
            raise

    async def destroy(self, box_id: str) -> None:
        """Terminate the sandbox; see ``Provider.destroy``."""
        try:
            async with _asking(CALL_SECONDS):
                sandbox = await self._sandbox(box_id)
                self._sandboxes.pop(box_id, None)
                try:
                    await sandbox.terminate.aio()
                finally:
                    await sandbox.detach.aio()
        except ProviderFailed as error:
            if error.cause is not Cause.LOST:
                raise
        self._labels.pop(box_id, None)

    async def list(self) -> Sequence[Found]:
        """List the sandboxes; see ``Provider.list``. The client gives their labels one by one: they are kept."""
        async with _asking(CALL_SECONDS):
            client, app = await self._workspace()
            listed = [
                each async for each in modal.Sandbox.list.aio(app_id=app.app_id, tags={MARK: MARKED}, client=client)
            ]
            free = asyncio.Semaphore(AT_A_TIME)

            async def label(sandbox: modal.Sandbox) -> None:
                async with free:
                    with suppress(exception.NotFoundError):  # it ended meanwhile
                        self._labels[sandbox.object_id] = dict(await sandbox.get_tags.aio())

            await asyncio.gather(*(label(each) for each in listed if each.object_id not in self._labels))
        there = {each.object_id for each in listed}
        self._labels = {each: labels for each, labels in self._labels.items() if each in there | self._sandboxes.keys()}
        return [Found(each, labels) for each, labels in self._labels.items() if each in there]

    async def close(self) -> None:
        """Close the connections."""
        if self._opened is not None:
            client, _ = self._opened
            async with _asking(CALL_SECONDS):
                for sandbox in self._sandboxes.values():
                    await sandbox.detach.aio()
                await client.close.aio()


@asynccontextmanager
async def _asking(seconds: float) -> AsyncIterator[None]:
    """Ask within the time.

    Raises:
        ProviderFailed: there is no answer, or it is an error.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except ProviderFailed:
        raise
    except TimeoutError as error:
        raise ProviderFailed(Cause.LATE, f"modal did not answer within {seconds:g} s") from error
    except Exception as error:
        # Some are of gRPC, of sockets, or of an address that is none.
        cause = next((cause for kind, cause in CAUSES if isinstance(error, kind)), Cause.FAILED)
        raise ProviderFailed(cause, f"modal answered {type(error).__name__}: {_sentence(error)}") from error


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or "nothing"
