"""The levels of isolation, and the command line that puts the guard into one of them.

A  bwrap, rlimits, a control group: namespaces for processes, network, mounts and users, a private root of read-only
   system directories and a size-limited working directory; memory and processes bounded by the kernel for the tree.
B  the same without a control group: the tree's total is bounded by the guard, which checks it at intervals.
C  no namespaces: Landlock for files, signals and TCP, and either a uid of its own or Landlock's signal scope.
D  rlimits only. Not isolation; refused unless it is asked for by name.

At every level but D the guard also installs the system call filter, and at every level the environment is empty: bwrap
keeps its own environment readable at ``/proc/1/environ`` whatever its options say, so it is started without one.
"""

import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flotilla.services.sandbox.guard import landlock, namespaces, seccomp
from flotilla.services.sandbox.guard.job import KILL_DESCENDANTS, KILL_NAMESPACE, KILL_UID, Confinement, Orders
from flotilla.services.sandbox.languages import TOOL_PATH, python_command
from flotilla.services.sandbox.limits import Limits
from flotilla.shared.errors import Unavailable
from flotilla.shared.schemas.sandbox import IsolationLevel

INSIDE_WRITABLE = (namespaces.WORK, namespaces.SHARED_MEMORY, "/dev/null")
START = "flotilla/services/sandbox/guard/start"
"""Below the guard's code: the directory that is put first on the module path of a fork server."""
SYSTEM_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
DEVICES = ("/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


@dataclass(frozen=True)
class Place:
    """What programs get of this machine.

    Attributes:
        python: interpreter that runs the guard.
        code: directory with the guard's modules, readable by every uid.
        readable: paths outside /usr that programs may read.
    """

    python: str
    code: str
    readable: tuple[str, ...] = ()


@dataclass(frozen=True)
class Slot:
    """One of the places that programs take turns in.

    Attributes:
        number: from 0.
        uid: uid of its own; None if the service cannot give one, for it is not root.
        directory: on the host; the working directory where there is no private root.
    """

    number: int
    uid: int | None
    directory: Path


@dataclass(frozen=True)
class Isolation:
    """One level, on this machine.

    Attributes:
        limits: the service's, which no program's exceed.
    """

    level: IsolationLevel
    place: Place
    limits: Limits = field(default_factory=Limits)

    @property
    def has_private_root(self) -> bool:
        """Whether programs see a root directory of their own, made by bwrap."""
        return self.level in (IsolationLevel.A, IsolationLevel.B)

    def work_directory(self, slot: Slot) -> str:
        """Where the program works, as it sees it."""
        return namespaces.WORK if self.has_private_root else str(slot.directory / "work")

    def command(self, slot: Slot) -> list[str]:
        """Make the command line that starts the slot's fork server."""
        server = python_command(self.place.python)
        return [*bwrap_command(self.place), *server] if self.has_private_root else server

    def start_directory(self, slot: Slot) -> str:
        """Where the fork server is started: the interpreter notes where ``main.py`` will be."""
        return "/" if self.has_private_root else self.work_directory(slot)

    def environment(self, slot: Slot) -> dict[str, str]:
        """Make the environment of programs."""
        directory = self.work_directory(slot)
        return {
            "PATH": TOOL_PATH,
            "HOME": directory,
            "TMPDIR": directory,
            "LANG": "C.UTF-8",
            "OPENSSL_CONF": "/dev/null",  # node does not start without a configuration that it can read
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }

    def start_environment(self, slot: Slot) -> dict[str, str]:
        """Make the environment of the slot's fork server, which finds the guard where the module path says."""
        code = namespaces.CODE if self.has_private_root else self.place.code
        return {**self.environment(slot), "PYTHONPATH": f"{code}/{START}:{code}"}

    def orders(self, slot: Slot) -> Orders:
        """What all runs of the slot have in common."""
        return Orders(self.work_directory(slot), self.environment(slot), self.confinement(slot), self.limits)

    def confinement(self, slot: Slot) -> Confinement:
        """What the guard does to the program."""
        if self.has_private_root:
            # The private root decides what there is; Landlock, where the kernel has it, keeps the program from sending
            # signals to the guard and from reading the memory of bwrap, which share its uid.
            readable = ("/",) if landlock.version() else None
            counts_held = self.level is not IsolationLevel.A
            return Confinement(KILL_NAMESPACE, readable=readable, writable=INSIDE_WRITABLE, counts_held=counts_held)
        scope = KILL_DESCENDANTS if slot.uid is None else KILL_UID
        if self.level is IsolationLevel.D:
            return Confinement(scope, slot.uid, has_seccomp=False, counts_held=True)
        return Confinement(
            scope,
            slot.uid,
            readable=("/usr", *filter(_is_beside_usr, SYSTEM_LINKS), *SYSTEM_FILES, *DEVICES, *self.place.readable),
            writable=(self.work_directory(slot), "/dev/null"),
            denies_metadata=slot.uid is None,
            counts_held=True,
        )


def _is_beside_usr(path: str) -> bool:
    """Return whether a directory exists outside /usr; links into /usr need no rule of their own."""
    return Path(path).exists() and not Path(path).resolve().is_relative_to("/usr")


def bwrap_command(place: Place) -> list[str]:
    """Make the command line of bwrap, up to the fork server.

    Its two capabilities count in its own user namespace alone: to mount, and to map its uid for a run.
    """
    bwrap = shutil.which("bwrap")
    assert bwrap is not None, "why_not was not asked"
    arguments = [bwrap, "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    arguments += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    arguments += ["--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETFCAP"]
    arguments += ["--uid", "0", "--gid", "0", "--hostname", "sandbox"]
    arguments += ["--ro-bind", "/usr", "/usr"]
    for path in map(Path, SYSTEM_LINKS):
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), str(path)]
        else:
            arguments += ["--ro-bind-try", str(path), str(path)]
    for readable in (*SYSTEM_FILES, *place.readable):
        arguments += ["--ro-bind-try", readable, readable]
    arguments += ["--ro-bind", place.code, namespaces.CODE, "--proc", "/proc", "--dev", "/dev"]
    # Each run has file systems of its own there.
    arguments += ["--dir", namespaces.WORK, "--symlink", namespaces.WORK[1:], "/tmp"]  # noqa: S108
    # The root and /dev are memory file systems of no bounded size: nothing may be written there.
    arguments += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", namespaces.WORK, "--"]
    return arguments


def why_not(level: IsolationLevel) -> str | None:
    """Return what this machine obviously lacks for a level; None if it is worth a try."""
    if level is IsolationLevel.D:
        return None
    if platform.machine() not in seccomp.ARCHITECTURES:
        return f"there is no system call table for {platform.machine()}"
    if level in (IsolationLevel.A, IsolationLevel.B):
        return None if shutil.which("bwrap") else "bwrap is not installed"
    version = landlock.version()
    if version == 0:
        return "the kernel has no Landlock, or it is switched off"
    if os.getuid() != 0 and version < landlock.SCOPE_VERSION:
        return (
            f"the service is not root, so programs share its uid, and Landlock version {version} does not keep them "
            f"from sending it signals (version {landlock.SCOPE_VERSION} does)"
        )
    return None


def candidates(wanted: IsolationLevel | None, *, allows_unsafe: bool) -> Sequence[IsolationLevel]:
    """List the levels to try, best first.

    Raises:
        Unavailable: level D is wanted and not allowed.
    """
    if wanted is IsolationLevel.D and not allows_unsafe:
        raise Unavailable(
            "isolation level D is no isolation: set FLOTILLA_UNSAFE_SANDBOX=1 as well, or leave FLOTILLA_SANDBOX_LEVEL "
            "out for the best level that works"
        )
    if wanted is not None:
        return [wanted]
    levels = list(IsolationLevel)
    return levels if allows_unsafe else levels[:-1]


def ways_out(*, uid: int, landlock_version: int, works: IsolationLevel | None) -> list[str]:
    """List what would let a service start under which no wanted level works, the best first.

    Args:
        uid: of the service.
        landlock_version: of the kernel, 0 for none.
        works: a level that was not wanted, and works.
    """
    if works is not None:
        return [f"set FLOTILLA_SANDBOX_LEVEL={works.value}, which works here, or leave it out"]
    ways = []
    if uid != 0 and 0 < landlock_version < landlock.SCOPE_VERSION:
        ways.append(
            "run it as root, so that each program gets a uid of its own (level C; Compose: FLOTILLA_SANDBOX_USER=root)"
        )
    elif landlock_version == 0:
        ways.append("use a kernel with Landlock switched on (level C: Linux 5.13 as root, 6.12 as another user)")
    ways.append("let it make user namespaces for bwrap (level B)")
    ways.append("set FLOTILLA_UNSAFE_SANDBOX=1 for level D, which is no isolation")
    return ways


def way_to_a(reason: str) -> str:
    """Return what would make level A work, by why it does not."""
    if "bwrap is not installed" in reason:
        return "for level A install bubblewrap: apt install bubblewrap"
    if "control group" in reason:
        return "for level A give it a control group: systemd-run --user --scope -p Delegate=yes flotilla up"
    return "level A needs user namespaces for bwrap and a control group that may be written: docs/sandbox.md"
