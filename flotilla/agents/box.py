"""A box: a root directory of its own in which the commands of one episode run, and what they start lives on.

bwrap makes it: this machine's ``/usr`` and what of ``/etc`` names users and hosts are there to be read, everything else
is the box's, and ends with it. Processes, mounts and users are apart from the machine's; the network is, too, where
the box is closed: it then has one way out, to one address (``relay.py``).
"""

import asyncio
import contextlib
import logging
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path, PurePosixPath
from typing import Final

from flotilla.agents.relay import INSIDE, SOCKET, relaying
from flotilla.services.sandbox.trees import own_directory, remove_tree
from flotilla.shared.errors import InvalidSpec, Unavailable

log = logging.getLogger(__name__)

ORDERS: Final = "/.orders"
WAY_OUT: Final = "/.relay"
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LINKS: Final = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
NAMES: Final = (
    "passwd", "group", "hosts", "resolv.conf", "nsswitch.conf", "services", "protocols", "localtime", "ssl/certs",
    "ssl/cert.pem", "ssl/openssl.cnf", "pki/tls/certs", "pki/tls/cert.pem", "pki/tls/openssl.cnf", "pki/ca-trust",
    "ca-certificates", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "mime.types",
)  # fmt: skip
"""What of ``/etc`` is in a box: of certificates those that are public, for a box of root reads what root does."""
MOUNTS: Final = {"tests": "/tests", "agent": "/logs/agent", "verifier": "/logs/verifier"}
"""Folders that both sides see, by name: a box cannot put a link in their place, and the first is read there only."""
LOOP: Final = (
    f'while IFS= read -r order; do /bin/sh "{ORDERS}/$order" < /dev/null > /dev/null 2>&1; printf "%s\\n" "$?"; done'
)
TIMED_OUT: Final = frozenset({124, 137})
"""Statuses of ``timeout``: it ended the command, or had to kill it."""
NOT_RUN: Final = frozenset({126, 127})
"""Statuses of a shell: the command cannot be executed, or is not there."""
GRACE_SECONDS: Final = 5.0
SAID: Final = "bwrap.txt"
"""What bwrap itself complains of."""
MOST_BYTES: Final = 64 * 1024
"""Of a file that is read from a box."""


class Box:
    """A box that is open.

    Args:
        folder: of this machine, with ``root``, ``orders`` and those of ``MOUNTS``.
        process: of bwrap, in which the shell waits for orders.
    """

    def __init__(self, folder: Path, process: asyncio.subprocess.Process) -> None:
        self._folder, self._process = folder, process
        self._number = 0

    async def run(
        self, command: str, *, folder: PurePosixPath, variables: Mapping[str, str], output: str, seconds: float
    ) -> int:
        """Run a shell's command to its end; return its status.

        Args:
            command: what ``sh -c`` is given.
            folder: where, in the box.
            variables: of its environment.
            output: the file in the box that gets what it writes.
            seconds: after which it is ended; the status is one of ``TIMED_OUT`` then.

        Raises:
            Unavailable: the box has ended.
        """
        self._number += 1
        order = f"{self._number}.sh"
        lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        lines.append(f"mkdir -p {shlex.quote(str(folder))} && cd {shlex.quote(str(folder))} || exit 125")
        ended = f"timeout -k {GRACE_SECONDS:g} {seconds:g} /bin/sh -c {shlex.quote(command)}"
        lines.append(f"exec {ended} > {shlex.quote(output)} 2>&1")
        (self._folder / "orders" / order).write_text("\n".join(lines) + "\n", encoding="utf-8")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(seconds + 3 * GRACE_SECONDS):
                self._process.stdin.write(f"{order}\n".encode())
                await self._process.stdin.drain()
                return int(await self._process.stdout.readline())
        except (TimeoutError, OSError, ValueError) as error:
            said = (self._folder / SAID).read_text(encoding="utf-8", errors="replace").strip()[-300:]
            raise Unavailable(f"the episode's box has ended: {said or repr(error)}") from error
        finally:
            # It has the episode's key.
            (self._folder / "orders" / order).unlink(missing_ok=True)

    def fill(self, name: str, source: Path) -> None:
        """Copy a folder of this machine into one of ``MOUNTS``."""
        shutil.copytree(source, self._folder / name, symlinks=True, dirs_exist_ok=True)

    def clear(self, name: str, *files: str) -> None:
        """Remove files from one of ``MOUNTS``, whatever rights the box has left there."""
        (self._folder / name).chmod(0o755)
        for path in (self._folder / name / file for file in files):
            try:
                path.unlink(missing_ok=True)
            except IsADirectoryError:
                remove_tree(path)

    def read(self, name: str, file: str) -> str | None:
        """Read a file in one of ``MOUNTS``, its end if it is long; None where there is none, or it is a link."""
        try:
            descriptor = os.open(self._folder / name / file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        with os.fdopen(descriptor, "rb") as opened:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            opened.seek(max(0, os.fstat(descriptor).st_size - MOST_BYTES))
            return opened.read(MOST_BYTES).decode(errors="replace")


def why_not() -> str | None:
    """Return why there are no boxes on this machine; None if there are."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return "bwrap is not installed (apt install bubblewrap)"
    tried = [bwrap, "--unshare-user", "--unshare-pid", "--ro-bind", "/", "/", "--", "/bin/true"]
    done = subprocess.run(tried, capture_output=True, text=True, timeout=30, check=False)
    return None if done.returncode == 0 else f"bwrap cannot make namespaces here: {done.stderr.strip()[:300]}"


def folder_of_boxes() -> AbstractContextManager[Path]:
    """Have a folder for boxes; what is in that of an agent that was killed the next one removes."""
    return own_directory()


@asynccontextmanager
async def open_box(
    copies: Sequence[tuple[Path, PurePosixPath]],
    *,
    readable: Sequence[Path] = (),
    keep: Path | None = None,
    only: str | None = None,
    parent: Path | None = None,
) -> AsyncIterator[Box]:
    """Open a box where there are any, see ``why_not``; what is in it ends with it.

    Args:
        copies: files and folders of this machine, and where they are in the box.
        readable: further paths of this machine that can be read there.
        keep: folder in which its files are left; None: nowhere.
        only: the address that it reaches, as ``url_inside`` calls it; None: all that this machine reaches.
        parent: folder for its files where they are not kept; None: that of temporary files.

    Raises:
        Unavailable: it does not come to be.
    """
    bwrap = shutil.which("bwrap")
    assert bwrap is not None, "why_not was not asked"
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="box-", dir=keep or parent))
    try:
        await asyncio.to_thread(furnish, folder, copies)
        with (folder / SAID).open("wb") as said:
            process = await asyncio.create_subprocess_exec(
                bwrap,
                *_arguments(folder, readable, is_closed=only is not None),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=said,
            )
        try:
            async with AsyncExitStack() as stack:
                box = Box(folder, process)
                if only is not None:
                    await stack.enter_async_context(relaying(folder / "relay", only))
                    await _open_way_out(box)
                yield box
        finally:
            # What runs in it has a process namespace of its own, which ends with bwrap.
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    finally:
        if keep is None:
            await asyncio.to_thread(_remove, folder)


def _remove(folder: Path) -> None:
    try:
        remove_tree(folder)
    except OSError as error:
        log.warning("a box's folder is left", extra={"folder": str(folder), "error": str(error)})


async def _open_way_out(box: Box) -> None:
    command = f"exec /usr/bin/python3 -I -S -c {shlex.quote(INSIDE)} {WAY_OUT}/{SOCKET}"
    output = "/logs/agent/relay.txt"
    status = await box.run(command, folder=PurePosixPath("/"), variables={}, output=output, seconds=30.0)
    if status:
        said = (box.read("agent", "relay.txt") or "").strip()[-300:]
        raise Unavailable(f"a closed box needs /usr/bin/python3 for its way out (status {status}): {said}")


def furnish(folder: Path, copies: Sequence[tuple[Path, PurePosixPath]]) -> None:
    """Make the folders of a box, and copy files and folders into its root: links as links, and never through one.

    Raises:
        InvalidSpec: a copy's place is outside of the root, a link is on the way to it, or something else is there.
    """
    for name in ("root", "orders", "relay", *MOUNTS):
        (folder / name).mkdir()
    for name in ("root", "tmp", "logs/artifacts"):
        (folder / "root" / name).mkdir(parents=True)
    for source, target in copies:
        try:
            _copy(source, folder / "root", target)
        except (FileExistsError, NotADirectoryError, IsADirectoryError, shutil.SpecialFileError) as error:
            raise InvalidSpec(f"{source.name} cannot be copied to {target}: {error}") from error


def _copy(source: Path, root: Path, target: PurePosixPath) -> None:
    is_folder = source.is_dir() and not source.is_symlink()
    place, parts = root, target.parts[1:]
    if not is_folder and (root / str(target).lstrip("/")).is_dir():
        parts = (*parts, source.name)
    for part in parts:
        if not place.is_dir():
            place.mkdir()
        place /= part
        if part == ".." or place.is_symlink():
            raise InvalidSpec(f"{source.name} cannot be copied to {target}: it leads out of the box, or through a link")
    if not is_folder:
        shutil.copy2(source, place, follow_symlinks=False)
        return
    place.mkdir(exist_ok=True)
    for each in sorted(source.iterdir()):
        _copy(each, root, target / each.name)


def _arguments(folder: Path, readable: Sequence[Path], *, is_closed: bool) -> list[str]:
    """Make the arguments of bwrap, up to the shell that waits for orders."""
    words = ["--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--uid", "0", "--gid", "0"]
    words += ["--hostname", "box", "--clearenv", "--setenv", "PATH", PATH, "--setenv", "HOME", "/root"]
    words += ["--setenv", "LANG", "C.UTF-8", "--bind", str(folder / "root"), "/", "--ro-bind", "/usr", "/usr"]
    for path in map(Path, LINKS):
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), str(path)]
        else:
            words += ["--ro-bind-try", str(path), str(path)]
    for path in (*(Path("/etc") / name for name in NAMES), *readable):
        words += ["--ro-bind-try", str(path), str(path)]
    for name, place in MOUNTS.items():
        words += ["--ro-bind" if name == "tests" else "--bind", str(folder / name), place]
    if is_closed:
        words += ["--unshare-net", "--ro-bind", str(folder / "relay"), WAY_OUT]
    words += ["--ro-bind", str(folder / "orders"), ORDERS, "--proc", "/proc", "--dev", "/dev"]
    return [*words, "--", "/bin/sh", "-c", LOOP]
