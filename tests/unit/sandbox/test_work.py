"""What comes back of a box is the program's word: whatever it is, it is read, and says nothing of the sandbox."""

import base64
import io
import shutil
import subprocess
import tarfile
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from flotilla.services.sandbox.boxes.conversation import BoxConversation
from flotilla.services.sandbox.boxes.work import BASE, GONE, Work, do, told
from flotilla.services.sandbox.guard.job import EXITED, NOT_STARTED, OVER_LIMIT, TIMED_OUT, Cell, Phase
from flotilla.services.sandbox.limits import Limits
from flotilla.services.sandbox.providers.base import Box, Cause, Found, ProviderFailed, Wanted

BOX = Box("b", "b", "image", 0.0)
PHASE = Phase("run", ("python3", "main.py"), 10.0)


class Given:
    """A provider whose boxes answer with what it is given."""

    kind: ClassVar[str] = "given"

    def __init__(self, result: bytes | None, code: int = 0) -> None:
        self.result, self.code = result, code
        self.written: dict[str, bytes] = {}
        self.scripts: list[str] = []

    async def create(self, wanted: Wanted) -> Box:
        raise NotImplementedError

    async def execute(self, box: Box, script: str, seconds: float) -> int:
        self.scripts.append(script)
        return self.code

    async def write(self, box: Box, path: str, content: bytes) -> None:
        self.written[path] = content

    async def read(self, box: Box, path: str, max_bytes: int) -> bytes | None:
        return self.result

    async def destroy(self, box_id: str) -> None: ...

    async def list(self) -> Sequence[Found]:
        return []

    async def close(self) -> None: ...


def packed(files: Mapping[str, bytes], links: Mapping[str, str] | None = None) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return content.getvalue()


async def test_files_and_script_go_as_one_archive() -> None:
    given = Given(packed({"meta": b"run 0 1.0 1.5\n"}))

    done = await do(given, BOX, Work((PHASE,), Limits(), {"src/a b": base64.b64encode(b"x").decode()}))

    (content,) = given.written.values()
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        names = archive.getnames()
    assert [name.partition("/")[2] for name in names] == ["run.sh", "run.in", "src/a b"]
    assert names[-1] == "work/src/a b"
    assert (done.phases[0].outcome, done.phases[0].return_code, done.phases[0].seconds) == (EXITED, 0, 0.5)


@pytest.mark.parametrize(
    ("meta", "outcome", "code", "words"),
    [
        ("run 0 1 2", EXITED, 0, ""),
        ("run 139 1 2", EXITED, -11, ""),
        ("run 137 1 2", EXITED, -9, "was killed"),
        ("run 137 1 11.2", TIMED_OUT, None, "time limit exceeded: 10 s"),
        ("run 124 1 11", TIMED_OUT, None, "time limit exceeded: 10 s"),
        ("run 124 1 2", EXITED, 124, ""),
        ("run missing 0 0", OVER_LIMIT, None, "left no results"),
    ],
)
async def test_how_a_command_ended_is_read(meta: str, outcome: str, code: int | None, words: str) -> None:
    done = await do(Given(packed({"meta": meta.encode()})), BOX, Work((PHASE,), Limits()))

    (phase,) = done.phases
    assert (phase.outcome, phase.return_code) == (outcome, code)
    assert words in phase.detail


@pytest.mark.parametrize(
    "result",
    [
        None,
        b"",
        b"no archive at all",
        packed({"meta": b"\xff\xfe"}),
        packed({"meta": b"run zero 1 2"}),
        packed({"meta": b"other 0 1 2"}),
        packed({"meta": b"run 0 1 2"})[:600],
        packed({}, links={"meta": "/etc/passwd"}),
    ],
)
async def test_results_that_the_program_took_away_or_forged_are_its_failure(result: bytes | None) -> None:
    done = await do(Given(result, code=1), BOX, Work((PHASE,), Limits(), fetch=("a",)))

    if done.phases[0].outcome != EXITED:  # a broken end leaves what came before it
        assert done.phases[0].outcome == OVER_LIMIT
        assert "left no results" in done.phases[0].detail
    assert done.files == {}


@pytest.mark.parametrize("meta", ["run 0 nan 0", "run 0 100 0", "run 0 0 inf", "run 999 0 1", "run -9 0 1"])
async def test_a_forged_end_that_no_command_has_is_a_failure(meta: str) -> None:
    done = await do(Given(packed({"meta": meta.encode()})), BOX, Work((PHASE,), Limits()))

    assert (done.phases[0].outcome, done.phases[0].seconds) == (OVER_LIMIT, 0.0)


async def test_files_are_fetched_up_to_the_limit_and_links_are_not_followed() -> None:
    result = packed({"meta": b"run 0 1 2", "f0": b"abc", "f1": b"def"}, links={"f2": "/etc/passwd"})

    done = await do(Given(result), BOX, Work((PHASE,), Limits(fetch_bytes=5), fetch=("a", "b", "c")))

    assert done.files == {"a": base64.b64encode(b"abc").decode()}
    assert [note.split(" ")[0] for note in done.notes] == ["b"]


async def test_an_output_is_cut_again_here() -> None:
    result = packed({"meta": b"run 0 1 2", "run.out": b"x" * 100})

    done = await do(Given(result), BOX, Work((PHASE,), Limits(output_bytes=10)))

    assert done.phases[0].output()[0] == "x" * 10 + "\n[output cut after 10 bytes]\n"


def claiming(size: bytes, kind: bytes = tarfile.REGTYPE, content: bytes = b"") -> bytes:
    """Make the head of a file whose size is what it claims, with a checksum that is right."""
    head = bytearray(tarfile.TarInfo("meta").tobuf(tarfile.USTAR_FORMAT))
    head[124:136], head[156:157] = size.ljust(12, b"\0"), kind
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + content


def sparse(num_bytes: int) -> bytes:
    """Make a sparse file of GNU's that claims so many bytes and has none."""
    head = bytearray(claiming(b"0", tarfile.GNUTYPE_SPARSE))
    head[257:265] = b"ustar  \0"
    head[386:410] = b"%011o\0%011o\0" % (num_bytes, 0)
    head[483:495] = b"%011o\0" % num_bytes
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + bytes(1024)


@pytest.mark.parametrize(
    "result",
    [
        sparse(7 << 30),
        claiming(b"\xff" * 12, b"x"),
        claiming(b"\xff" * 12, b"L"),
        claiming(b"\xff" * 10 + b"\xfc\x00"),
        claiming(b"\x80" + b"\x7f" * 11),
        claiming(b"-0000001000"),
        claiming(b"77777777777"),
        claiming(b"1_0"),
    ],
)
async def test_an_archive_that_lies_costs_no_memory_and_no_time(result: bytes) -> None:
    tracemalloc.start()
    try:
        done = await do(Given(result), BOX, Work((PHASE,), Limits()))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert done.phases[0].outcome == OVER_LIMIT
    assert most < 1 << 20


class Lost(Given):
    """A provider whose box is taken away while a program runs in it, which is seen at the next call alone."""

    async def execute(self, box: Box, script: str, seconds: float) -> int:
        if self.scripts:
            raise ProviderFailed(Cause.LOST, "the box is gone")
        return await super().execute(box, script, seconds)


@pytest.mark.parametrize("code", [137, 143])
async def test_a_box_that_was_taken_away_is_no_failure_of_the_program(code: int) -> None:
    with pytest.raises(ProviderFailed, match="gone"):
        await do(Lost(None, code), BOX, Work((PHASE,), Limits(), is_first=True))


@pytest.mark.parametrize("code", [71, 126, 127])
async def test_an_image_in_which_nothing_can_run_is_no_failure_of_the_program(code: int) -> None:
    with pytest.raises(ProviderFailed, match=r"nothing can run in a box of 'image' .*needs sh, tar") as failed:
        await do(Given(None, code), BOX, Work((PHASE,), Limits(), is_first=True))

    assert failed.value.cause is Cause.REFUSED
    later = await do(Given(None, code), BOX, Work((PHASE,), Limits()))
    assert later.phases[0].outcome == OVER_LIMIT, "a session may have removed it"


@pytest.mark.parametrize(("code", "tool", "is_first"), [(80, "g++", True), (81, "python3", True), (80, "", False)])
async def test_an_image_without_a_language_is_told_where_nothing_in_the_box_can_say_so(
    code: int, tool: str, is_first: bool
) -> None:
    given = Given(packed({"meta": b"compile 0 1 2\nrun 0 1 2"}), code)
    phases = (Phase("compile", ("g++", "main.cpp"), 10.0), PHASE)

    done = await do(given, BOX, Work(phases, Limits(), is_first=is_first))

    last = done.phases[-1]
    assert last.outcome == (NOT_STARTED if is_first else OVER_LIMIT)
    assert not is_first or last.detail == f"the image has no {tool!r}"


class Here(Given):
    """A provider whose one box is a directory."""

    def __init__(self, root: Path) -> None:
        super().__init__(None)
        self.root = root

    async def execute(self, box: Box, script: str, seconds: float) -> int:
        for path, content in self.written.items():
            Path(self.inside(path)).write_bytes(content)
        self.written.clear()
        code = subprocess.run(["sh", "-c", self.inside(script)], cwd=self.root, start_new_session=True).returncode
        return code if code >= 0 else 128 - code

    async def read(self, box: Box, path: str, max_bytes: int) -> bytes | None:
        return Path(self.inside(path)).read_bytes() if Path(self.inside(path)).exists() else None

    def inside(self, text: str) -> str:
        return text.replace(BASE, str(self.root / "flotilla"))


def shell(command: str) -> tuple[Phase, ...]:
    return (Phase("run", ("sh", "-c", command), 10.0),)


@pytest.mark.parametrize("command", ["kill -9 0", "rm -rf ../*", "kill -9 $PPID; kill -9 0"])
async def test_a_program_that_takes_its_results_away_has_failed(tmp_path: Path, command: str) -> None:
    done = await do(Here(tmp_path), BOX, Work(shell(command), Limits(), is_first=True))

    assert done.phases[0].outcome == OVER_LIMIT or done.phases[0].return_code != 0


async def test_a_box_in_the_place_of_one_that_was_lost_is_not_taken_for_it(tmp_path: Path) -> None:
    """Kubernetes makes a pod of the same name anew, and what an agent had left in it would be graded as missing."""
    provider = Here(tmp_path)
    await do(provider, BOX, Work(shell("echo answer > solution"), Limits(), is_first=True))
    kept = await do(provider, BOX, Work(shell("cat solution"), Limits()))
    shutil.rmtree(tmp_path / "flotilla")

    with pytest.raises(ProviderFailed, match="another one") as lost:
        await do(provider, BOX, Work(shell("cat solution"), Limits()))

    assert kept.phases[0].output()[0] == "answer\n"
    assert lost.value.cause is Cause.LOST


async def test_a_box_that_is_made_anew_while_a_program_runs_is_no_failure_of_it(tmp_path: Path) -> None:
    class Anew(Here):
        async def execute(self, box: Box, script: str, seconds: float) -> int:
            await super().execute(box, script, seconds)
            shutil.rmtree(tmp_path / "flotilla", ignore_errors=True)
            return GONE if "run.sh" not in script else 137

    with pytest.raises(ProviderFailed, match="another one"):
        await do(Anew(tmp_path), BOX, Work(shell("true"), Limits(), is_first=True))


async def test_what_a_compiler_does_not_make_is_the_programs_failure(tmp_path: Path) -> None:
    phases = (Phase("compile", ("true",), 10.0), Phase("run", ("./main",), 10.0))
    done = await do(Here(tmp_path), BOX, Work(phases, Limits(), is_first=True))
    lacking = await do(Here(tmp_path), BOX, Work((Phase("run", ("no-such-tool",), 1.0),), Limits(), is_first=True))

    assert [(phase.outcome, phase.return_code) for phase in done.phases] == [(EXITED, 0), (EXITED, 127)]
    assert done.phases[1].output()[1] == "./main: not found\n"
    assert (lacking.phases[0].outcome, lacking.phases[0].detail) == (NOT_STARTED, "the image has no 'no-such-tool'")


@pytest.mark.parametrize(
    ("said", "outcome", "code", "is_alive"),
    [
        ('{"outcome": "exited", "code": 1, "is_alive": true}', EXITED, 1, True),
        ('{"outcome": "timed_out", "code": 0, "is_alive": true}', TIMED_OUT, None, True),
        ('{"outcome": "exited", "code": -9, "is_alive": false}', EXITED, -9, False),
        ('{"outcome": "not_started", "code": 0, "is_alive": true}', EXITED, 0, False),
        ('{"outcome": "starved", "is_alive": true}', OVER_LIMIT, None, False),
        ('{"outcome": ["exited"], "code": {}, "is_alive": 1}', OVER_LIMIT, None, False),
        ('{"outcome": "exited", "code": 1e9, "is_alive": true}', OVER_LIMIT, None, False),
        ('{"outcome": "exited", "code": 123456, "is_alive": true}', OVER_LIMIT, None, False),
    ],
)
async def test_a_cell_says_of_itself_how_it_ended_and_nothing_of_the_sandbox(
    said: str, outcome: str, code: int | None, is_alive: bool
) -> None:
    given = Given(packed({"meta": b"run 0 1 2", "told": said.encode()}))

    result = await BoxConversation(given, BOX, Limits(), is_shell=False).run(Cell("1", 10.0))

    (phase,) = result.result.phases
    assert (phase.outcome, phase.return_code, result.is_alive) == (outcome, code, is_alive)


@pytest.mark.parametrize("said", [b"", b"[1]", b"{broken", b"null", b"[" * 4096])
async def test_what_a_command_has_to_say_may_be_nothing(said: bytes) -> None:
    done = await do(Given(packed({"meta": b"run 0 1 2", "told": said})), BOX, Work((PHASE,), Limits()))

    assert told(done) == {}
