"""What whoever runs a short program to its end may rely on."""

import sys

import pytest

from flotilla.shared.children.spawning import output_of


def run(code: str, *, seconds: float = 60.0) -> str:
    return output_of([sys.executable, "-c", code], seconds=seconds)


def test_what_it_writes_is_returned_without_secrets_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOTILLA_TOKEN", "secret")

    assert run("import os, sys; print('FLOTILLA_TOKEN' in os.environ, repr(sys.stdin.read()))") == "False ''\n"
    assert run("import os; os.write(1, b'\\xff')") == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("code", "match"),
    [
        (
            "import sys; print('the reason', file=sys.stderr); sys.exit(3)",
            "ended with code 3; its last lines: the reason",
        ),
        ("import os; os.kill(os.getpid(), 9)", r"ended with code -9 \(SIGKILL"),
    ],
)
def test_a_failure_is_explained(code: str, match: str) -> None:
    with pytest.raises(ChildProcessError, match=match):
        run(code)


def test_one_that_does_not_end_is_killed_and_one_that_is_not_there_is_an_error() -> None:
    with pytest.raises(TimeoutError, match=r"did not end within 0\.1 s"):
        run("import time; time.sleep(600)", seconds=0.1)
    with pytest.raises(FileNotFoundError):
        output_of(["/no/such/program"], seconds=1.0)
