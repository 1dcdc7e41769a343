"""What a command of a script changes for those after it is known, or makes what it changes not known."""

import pytest

from flotilla.importers.shell import Command, read_script


def last(text: str, **environment: str) -> Command:
    return read_script(text, {}, source="run.sh", environment=environment).commands[-1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=1\nunset A\nrun ${A:-2}", ["run", "2"]),
        ("unset E\nrun ${E:-2}", ["run", "2"]),
        ("L=(a b)\nunset L\nrun \"${L[@]}\" c", ["run", "c"]),
        ("unset -v A\nrun ${A-2}", ["run", "2"]),
        ("A=1\nA=2 python other.py\nrun $A", ["run", "1"]),
        ("A=1\nA=2 run $A", ["run", "1"]),
        ("A=2 B=3 run x", ["run", "x"]),
        ("run 'a={b,c}' \"d={e,f}\" g=${A:-h,i} {} x{1}", ["run", "a={b,c}", "d={e,f}", "g=h,i", "{}", "x{1}"]),
        ("A={b,c}\nrun \"$A\"", ["run", "{b,c}"]),
        ("run a\nexit 0\nrun b", ["run", "a"]),
        ("if [ -f x ]; then exit 1; fi\nrun b", ["run", "b"]),
        ("cd x || exit 1\nmkdir y || true\nrun b", ["run", "b"]),
        ("cd x && A=1 && run $A", ["run", "1"]),
        ("false || A=1\nA=2\nrun $A", ["run", "2"]),
        ("A=1\nsource /opt/venv/bin/activate\n. ~/.bashrc\nrun $A", ["run", "1"]),
        ("source my.env\nA=1\nrun $A", ["run", "1"]),
    ],
)  # fmt: skip
def test_later_commands_see_what_a_shell_would_show_them(text: str, expected: list[str]) -> None:
    found = last(text, E="1")

    assert found.problem is None
    assert found.words == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run a={b,c}", "braces"),
        ("A=1\ncommand -v x && A=8 || A=4\nrun $A", "whether this runs"),
        ("A=1\ngrep -q x y && A=8\nrun $A", "whether this runs"),
        ("nproc || run a", "whether this runs"),
        ("nproc || other && run a", "whether this runs"),
        ("run data/{train,test}.parquet", "braces"),
        ("run x{1..3}", "braces"),
        ("set -- $(nproc)\nrun \"$@\"", "arguments"),
        ("if [ -f x ]; then shift; fi\nrun $1", "arguments"),
        ("A=1\nsource my.env\nrun $A", "my.env"),
        ("A=1\n. ./config.sh\nrun $A", "config.sh"),
        ("if [ -f x ]; then unset A; fi\nrun ${A:-1}", "whether this runs"),
    ],
)  # fmt: skip
def test_what_such_a_command_may_have_changed_is_not_known(text: str, said: str) -> None:
    found = last(text)

    assert found.problem is not None
    assert said in found.problem.detail


def test_options_of_the_shell_are_no_arguments() -> None:
    assert last('set -euxo pipefail\nset -x\nrun "$@" a').words == ["run", "a"]
