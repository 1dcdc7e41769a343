"""What comes back of a box is the program's word: whatever it is, it is read, and says nothing of the sandbox."""

import base64
import io
import tarfile
from collections.abc import Mapping, Sequence
from typing import ClassVar

import pytest

from flotilla.services.sandbox.boxes.work import Work, do, told
from flotilla.services.sandbox.guard.job import EXITED, NOT_STARTED, OVER_LIMIT, TIMED_OUT, Phase
from flotilla.services.sandbox.limits import Limits
from flotilla.services.sandbox.providers.base import Box, Found, Wanted

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
        ("run missing 0 0", NOT_STARTED, None, "the image has no 'python3'"),
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


async def test_files_are_fetched_up_to_the_limit_and_links_are_not_followed() -> None:
    result = packed({"meta": b"run 0 1 2", "f0": b"abc", "f1": b"def"}, links={"f2": "/etc/passwd"})

    done = await do(Given(result), BOX, Work((PHASE,), Limits(fetch_bytes=5), fetch=("a", "b", "c")))

    assert done.files == {"a": base64.b64encode(b"abc").decode()}
    assert [note.split(" ")[0] for note in done.notes] == ["b"]


async def test_an_output_is_cut_again_here() -> None:
    result = packed({"meta": b"run 0 1 2", "run.out": b"x" * 100})

    done = await do(Given(result), BOX, Work((PHASE,), Limits(output_bytes=10)))

    assert done.phases[0].output()[0] == "x" * 10 + "\n[output cut after 10 bytes]\n"


@pytest.mark.parametrize("said", [b"", b"[1]", b"{broken", b"null"])
async def test_what_a_command_has_to_say_may_be_nothing(said: bytes) -> None:
    done = await do(Given(packed({"meta": b"run 0 1 2", "told": said})), BOX, Work((PHASE,), Limits()))

    assert told(done) == {}
