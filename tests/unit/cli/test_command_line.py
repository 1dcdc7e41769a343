"""What is typed is understood, or refused with what was probably meant."""

import subprocess
import sys

import pytest

from flotilla.cli.__main__ import find_command, main
from flotilla.cli.command_line import build_parser, leaves
from flotilla.cli.exit_codes import ExitCode, exit_code_of
from flotilla.shared.errors import (
    ActionNotAllowed,
    Conflict,
    DeadlineExceeded,
    FlotillaError,
    InvalidSpec,
    NotFound,
    Unauthorized,
    Unavailable,
)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == ExitCode.USAGE
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["stauts"], "unknown command 'stauts': did you mean status"),
        (["up", "--roullouts", "2"], "unknown option --roullouts: did you mean --rollouts"),
        (["status", "--jsno=1"], "unknown option --jsno: did you mean --json?"),
        (["spec", "chekc", "x"], "unknown action 'chekc': did you mean check?"),
        (["import", "verll", "x"], "unknown system 'verll': did you mean verl"),
        (["status", "zero"], "unexpected argument: zero"),
        (["up", "--detac"], "unknown option --detac: did you mean --detach"),
    ],
)
def test_a_misspelt_word_is_told_what_was_meant(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hint in refusal(capsys, *words)


def test_a_word_like_no_other_is_told_all_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "spec", "zzz")

    assert said.endswith("unknown action 'zzz': choose from check, show, schema")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["up", "--rollouts", "many"], "--rollouts: must be a whole number of at least 1, got 'many'"),
        (["up", "--rollouts", "0"], "--rollouts: must be a whole number of at least 1, got '0'"),
        (["up", "--port", "70000"], "--port: must be a whole number from 0 to 65535, got '70000'"),
        (["up", "--port", "http"], "--port: must be a whole number from 0 to 65535, got 'http'"),
        (["show", "--step", "-1"], "--step: must be a whole number of at least 0, got '-1'"),
        (["run", "x.yaml", "--seed", "1.5"], "--seed: must be a whole number of at least 0, got '1.5'"),
        (["import", "verl", "x.yaml", "--rows", "0"], "--rows: must be a whole number of at least 1, got '0'"),
        (["drain", "x", "--notice", "soon"], "--notice: must be a number of seconds from 0 to 86400, got 'soon'"),
        (["token", "create", "x", "--expires", "2w"], "must be a number with m, h or d, such as 90d, or never"),
    ],
)
def test_a_value_that_is_not_allowed_is_told_what_is(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, *words).endswith(said)


def test_every_option_is_explained() -> None:
    unexplained = {
        f"{command} {option}"
        for command, parser in leaves(build_parser()).items()
        for action in parser._actions
        for option in action.option_strings
        if not action.help
    }

    assert unexplained == set()


@pytest.mark.parametrize(("words", "command"), [([], "doctor"), (["token"], "create")])
def test_a_command_alone_lists_what_there_is(
    words: list[str], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)

    assert ended.value.code == ExitCode.USAGE
    assert f"\n    {command} " in capsys.readouterr().err


def test_overrides_may_follow_options() -> None:
    found = build_parser().parse_args(["import", "verl", "a.yaml", "x=1", "--rows", "5", "y=2", "--strict", "z=3"])

    assert (found.file, found.overrides, found.rows, found.strict) == ("a.yaml", ["x=1", "y=2", "z=3"], 5, True)


@pytest.mark.parametrize("words", leaves(build_parser()))
def test_every_command_has_something_that_carries_it_out(words: str) -> None:
    assert callable(find_command(leaves(build_parser())[words].get_default("function")))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FlotillaError("x"), 1),
        (InvalidSpec("x"), 1),
        (NotFound("x"), 3),
        (Unavailable("x"), 4),
        (DeadlineExceeded("x"), 4),
        (Unauthorized("x"), 5),
        (Conflict("x"), 5),
        (ActionNotAllowed("x"), 5),
    ],
)
def test_an_exit_code_says_what_may_help(error: FlotillaError, code: int) -> None:
    assert exit_code_of(error) == code


def test_a_command_imports_nothing_of_another() -> None:
    """The help in particular waits for no library: start-up is what a person waits for with every command."""
    slow = ("torch", "httpx", "pydantic", "rich", "redis", "psutil", "numpy", "shtab")
    code = "import sys, flotilla.cli.command_line as c; c.build_parser(); print(*sys.modules)"

    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()

    assert set(loaded).isdisjoint(slow)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0

    script = capsys.readouterr().out
    assert all(words.split()[-1] in script for words in leaves(build_parser()))


@pytest.mark.parametrize("command", ["run", "evaluate", "up", "fork", "ls", "compare", "watch", "logs"])
def test_help_says_what_holds_where_an_option_is_left_out(command: str) -> None:
    options = [each for each in leaves(build_parser())[command]._actions if each.option_strings and each.nargs != 0]

    silent = [each.option_strings[0] for each in options if not each.required and "default" not in str(each.help)]

    # What only adds to a command.
    assert set(silent) <= {"--set", "--answers"}
    assert all("%(default)s" in str(each.help) or "default:" in str(each.help) for each in options if each.default)
