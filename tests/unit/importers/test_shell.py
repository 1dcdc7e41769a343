"""Launch scripts are read, never run; what would need running is refused with its line."""

import pytest

from shared.config.importers.shell import read_script
from shared.errors import InvalidSpec


def words(text: str, **fixed: str) -> list[str]:
    return read_script(text, fixed, source="run.sh").commands[-1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run a=1 b=2", ["run", "a=1", "b=2"]),
        ("run a=1 \\\n  b=2", ["run", "a=1", "b=2"]),
        ("A=x\nrun $A ${A}y \"$A z\" '$A'", ["run", "x", "xy", "x z", "$A"]),
        ("export A=x\nrun $A", ["run", "x"]),
        ("run ${A:-word} ${B:=\"${C:-deep}\"}", ["run", "word", "deep"]),
        ("A=3\nrun $((A * 2 + 1)) $(((A + A)))", ["run", "7", "6"]),
        ("A=$((1024 * 8))\nrun $((A / 3))", ["run", "2730"]),
        ("L=(a=1\n  # note\n  \"b=2 3\")\nrun \"${L[@]}\" c=4", ["run", "a=1", "b=2 3", "c=4"]),
        ("L=(a)\nL+=(b)\nrun \"${L[@]}\"", ["run", "a", "b"]),
        ("A=x\nA+=y\nrun $A", ["run", "xy"]),
        ("F=\"--a 1 --b\"\nrun $F", ["run", "--a", "1", "--b"]),
        ("run a # comment", ["run", "a"]),
        ("run a=1 2>&1 | tee log", ["tee", "log"]),
        ("run 2 > log", ["run", "2"]),
        ("run $HOME/x \"$@\"", ["run", "~/x"]),
        ("set -x; run a\\ b", ["run", "a b"]),
        ("read -r -d '' C <<EOF\nmod --a 1 \\\n --b 2\nEOF\nrun $C", ["run", "mod", "--a", "1", "--b", "2"]),
    ],
)  # fmt: skip
def test_words_are_expanded_as_a_shell_does(text: str, expected: list[str]) -> None:
    found = read_script(text, {}, source="run.sh").commands

    assert expected in found


def test_a_variable_that_is_given_wins_over_the_script() -> None:
    assert words("A=x\nrun $A", A="mine") == ["run", "mine"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\nif [ -f x ]; then\nA=1\nfi", 2),
        ("for i in 1 2; do run $i; done", 1),
        ("A=1\nB=$(nproc)", 2),
        ("A=`nproc`", 1),
        ("run $UNSET", 1),
        ("run ${A##*/}", 1),
        ("run 'open", 1),
        ("run $((1 +))", 1),
        ("run $((1 / 0))", 1),
        ("run $((__import__('os')))", 1),
        ("f() { run; }", 1),
        ("cat <<EOF\nno end", 1),
        ("[ -f x ] && run", 1),
        ("eval run", 1),
    ],
)
def test_what_cannot_be_followed_is_a_message_with_its_line(text: str, line: int) -> None:
    with pytest.raises(InvalidSpec) as caught:
        read_script(text, {}, source="run.sh")

    assert str(caught.value.errors[0]["path"]).startswith(f"run.sh:{line}")
