"""One piece of work in a box: files go there as one archive, a script runs commands, the results come back as another.

Only ``sh``, ``tar``, ``head`` and ``timeout`` are needed of an image. The script's own outputs go to files, so that
what a command leaves behind delays nothing, and its output is cut in the box.
"""

import base64
import io
import json
import math
import secrets
import shlex
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from flotilla.services.sandbox.guard.job import EXITED, NOT_STARTED, OVER_LIMIT, TIMED_OUT, Phase, PhaseResult
from flotilla.services.sandbox.guard.process import why_ended
from flotilla.services.sandbox.limits import Limits
from flotilla.services.sandbox.providers.base import Box, Cause, Provider, ProviderFailed

BASE: Final = "/tmp/flotilla"  # noqa: S108  in a box, which is one caller's alone
WORK: Final = "work"
"""The directory of programs, below ``BASE``."""
SLACK_SECONDS: Final = 30.0
"""For unpacking, packing and the provider, beyond the time of the commands."""
KILLED: Final = 137
UNABLE: Final = frozenset({71, 126, 127})
"""Exit codes of a box that cannot begin: a tool or room is missing; ``sh`` cannot be executed, or is not there."""
GONE: Final = 72
"""Exit code where nothing has run in the box although something has: it is another one in the place of the first."""
LACKING: Final = 80
"""Exit code where the command of the first phase is not there; of the second it is one more."""
BLOCK: Final = 512
FILE_TYPES: Final = frozenset({b"0", b"\0"})
SIZE_DIGITS: Final = frozenset(b"01234567")
TOLD: Final = "told"
"""A file of results, for a command's report beside its outputs."""

SCRIPT: Final = """\
cd "$(dirname "$0")" || exit 70
here=$(pwd)
mkdir -p ../work result && cd ../work || exit 70
phase() {
    name=$1 seconds=$2 tool=$3
    shift 2
    if ! command -v "$tool" >/dev/null 2>&1; then
        echo "$tool: not found" >"$here/$name.err"
        echo "$name 127 0 0" >>"$here/result/meta"
        return 127
    fi
    read -r began rest </proc/uptime
    timeout -s KILL "$seconds" "$@" <"$here/$name.in" >"$here/$name.out" 2>"$here/$name.err"
    code=$?
    read -r ended rest </proc/uptime
    echo "$name $code $began $ended" >>"$here/result/meta"
    return $code
}
fetch() {
    if [ -f "$2" ] && [ ! -L "$2" ] && [ "$(wc -c <"$2")" -le "$3" ]; then
        cat "$2" >"$here/result/$1"
    elif [ -e "$2" ]; then
        echo "$1" >>"$here/result/left"
    fi
}
"""


@dataclass(frozen=True)
class Work:
    """What is to be done in a box.

    Attributes:
        phases: commands; each but the last must succeed for the next.
        limits: of outputs and of files that come back.
        files: to put into the working directory, base64, by relative path.
        beside: files beside the script, by name.
        fetch: files to return, by relative path.
        name: of the script's directory, beside that of programs.
        is_first: whether nothing has run in the box: what is missing then was never there.
    """

    phases: Sequence[Phase]
    limits: Limits
    files: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, bytes] = field(default_factory=dict)
    fetch: Sequence[str] = ()
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    is_first: bool = False


@dataclass(frozen=True)
class Done:
    """What came of it.

    Attributes:
        files: those fetched, base64.
        told: the file of that name, if a command wrote one.
    """

    phases: tuple[PhaseResult, ...]
    files: Mapping[str, str]
    notes: tuple[str, ...]
    told: bytes


async def do(provider: Provider, box: Box, work: Work) -> Done:
    """Do a piece of work in a box.

    Raises:
        ProviderFailed: nothing is known of what the commands did.
    """
    name = work.name
    seconds = sum(phase.timeout_seconds for phase in work.phases) + SLACK_SECONDS
    packed, place = f"{BASE}-{name}.tar", f"{BASE}/{name}"
    await provider.write(box, packed, _pack(work))
    # What decides whose failure it is stands here, where nothing that runs in the box can change it.
    lacking = [
        f"command -v {shlex.quote(phase.argv[0])} >/dev/null 2>&1 || exit {LACKING + number}; "
        for number, phase in enumerate(work.phases)
        if "/" not in phase.argv[0]
    ]
    there = f"[ -d {BASE} ] || exit {GONE}; "
    script = ("" if work.is_first else there) + (
        "for tool in tar head timeout; do command -v $tool >/dev/null 2>&1 || exit 71; done; "
        f'mkdir -p {BASE} && cd {BASE} || exit 71; for old in */result.tar; do rm -rf "${{old%/*}}"; done; '
        f"tar -xf {packed} && rm -f {packed} || exit 71; {''.join(lacking)}sh {place}/run.sh; exit 0"
    )
    code = await provider.execute(box, script, seconds)
    if work.is_first and 0 <= code - LACKING < len(work.phases):
        return _lacking(work, work.phases[code - LACKING])
    if work.is_first and code in UNABLE:
        what = "it needs sh, tar, head and timeout, and room in /tmp"
        raise ProviderFailed(Cause.REFUSED, f"nothing can run in a box of {box.image!r} (exit code {code}): {what}")
    most = 2 * len(work.phases) * work.limits.output_bytes + work.limits.fetch_bytes + (1 << 20)
    if code not in {0, GONE}:
        # The script was killed: by what ran, or with its box.
        code_now = await provider.execute(box, there, SLACK_SECONDS)
        code = GONE if code_now == GONE else code
    if code == GONE:
        raise ProviderFailed(Cause.LOST, "the box is another one than before, and empty")
    result = await provider.read(box, f"{place}/result.tar", most) if code == 0 else None
    return _read(work, result, code)


def _lacking(work: Work, phase: Phase) -> Done:
    detail = f"the image has no {phase.argv[0]!r}"
    return Done((PhaseResult(phase.name, NOT_STARTED, None, 0.0, detail=detail),), {}, (), b"")


def _pack(work: Work) -> bytes:
    name = work.name
    lines = [SCRIPT]
    calls = []
    for phase in work.phases:
        words = [phase.name, f"{phase.timeout_seconds:g}", *phase.argv]
        calls.append("phase " + " ".join(map(shlex.quote, words)))
    lines.append(" && ".join(calls))
    for phase in work.phases:
        for stream in ("out", "err"):
            there = f'"$here/{phase.name}.{stream}"'
            lines.append(
                f"[ -f {there} ] && head -c {work.limits.output_bytes + 1} {there} "
                f'>"$here/result/{phase.name}.{stream}"'
            )
    lines += [
        f"fetch {number} {shlex.quote(f'./{path}')} {work.limits.fetch_bytes}" for number, path in _numbered(work)
    ]
    lines.append(f'[ -f "$here/{TOLD}" ] && head -c 4096 "$here/{TOLD}" >"$here/result/{TOLD}"')
    lines.append('tar -cf "$here/result.part" -C "$here/result" . && mv "$here/result.part" "$here/result.tar"')
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        _add(archive, f"{name}/run.sh", "\n".join(lines).encode() + b"\n")
        for phase in work.phases:
            _add(archive, f"{name}/{phase.name}.in", base64.b64decode(phase.stdin))
        for path, content in work.beside.items():
            _add(archive, f"{name}/{path}", content)
        for path, text in work.files.items():
            _add(archive, f"{WORK}/{path}", base64.b64decode(text))
    return packed.getvalue()


def _numbered(work: Work) -> list[tuple[str, str]]:
    return [(f"f{number}", path) for number, path in enumerate(work.fetch)]


def _add(archive: tarfile.TarFile, path: str, content: bytes) -> None:
    member = tarfile.TarInfo(path)
    member.size, member.mode = len(content), 0o755
    archive.addfile(member, io.BytesIO(content))


def _read(work: Work, result: bytes | None, code: int) -> Done:
    """Read what came back. Without it the program has removed it: nothing else had access.

    A program's files come from its box as it left them, so none of it is believed to be well formed.
    """
    found = dict(_plain_files(result or b""))
    phases = _phases(work, found)
    if not phases:
        detail = f"what it did cannot be read: the box's script ended with {code} and left no results"
        phases = (PhaseResult(work.phases[-1].name, OVER_LIMIT, None, 0.0, detail=detail),)
    files, notes, left = {}, [], work.limits.fetch_bytes
    skipped = found.get("left", b"").decode("utf-8", "replace").split()
    for number, path in _numbered(work):
        content = found.get(number)
        if content is not None and len(content) <= left:
            left -= len(content)
            files[path] = base64.b64encode(content).decode()
        elif content is not None or number in skipped:
            notes.append(f"{path} was left out: it is no file, or all together exceed {work.limits.fetch_bytes} bytes")
    return Done(phases, files, tuple(notes), found.get(TOLD, b""))


def _plain_files(packed: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the files of an archive up to where it is none: names and contents.

    Sizes and types are the program's word. ``tarfile`` believes them: of a sparse file of a few bytes it would make as
    many zeros as are claimed, and a size below zero leads it backwards.
    """
    at = 0
    while at + BLOCK <= len(packed):
        name, digits, kind = (
            packed[at : at + 100],
            packed[at + 124 : at + 136].strip(b"\0 "),
            packed[at + 156 : at + 157],
        )
        if not digits or not SIZE_DIGITS.issuperset(digits):
            return
        at += BLOCK
        size = int(digits, 8)
        if at + size > len(packed):
            return
        if kind in FILE_TYPES:
            yield name.partition(b"\0")[0].decode("utf-8", "replace").removeprefix("./"), packed[at : at + size]
        at += -(-size // BLOCK) * BLOCK


def _phases(work: Work, found: Mapping[str, bytes]) -> tuple[PhaseResult, ...]:
    lines = found.get("meta", b"").decode("utf-8", "replace").splitlines()
    results = []
    for phase, line in zip(work.phases, lines, strict=False):
        words = line.split()
        if len(words) != 4 or words[0] != phase.name:
            break
        try:
            code, seconds = int(words[1]), float(words[3]) - float(words[2])
        except ValueError:
            break
        if not (0 <= code < 256 and 0.0 <= seconds < math.inf):
            break
        is_late = code in (124, KILLED) and seconds >= phase.timeout_seconds - 0.05
        stdout, stderr = (_output(found.get(f"{phase.name}.{each}", b""), work.limits) for each in ("out", "err"))
        detail = why_ended(TIMED_OUT, phase.timeout_seconds) if is_late else ""
        if code == KILLED and not is_late:
            detail = f"it was killed, as is what exceeds the memory of {work.limits.memory_bytes} bytes"
        outcome = TIMED_OUT if is_late else EXITED
        ended = -(code - 128) if 128 < code < 128 + 65 else code
        results.append(PhaseResult(phase.name, outcome, None if is_late else ended, seconds, stdout, stderr, detail))
    return tuple(results)


def _output(content: bytes, limits: Limits) -> str:
    if len(content) > limits.output_bytes:
        content = content[: limits.output_bytes] + f"\n[output cut after {limits.output_bytes} bytes]\n".encode()
    return base64.b64encode(content).decode()


def told(done: Done) -> "dict[str, object]":
    """Read a command's report beside its outputs; empty if there is none."""
    try:
        found = json.loads(done.told or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
