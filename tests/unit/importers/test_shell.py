"""Launch scripts are read, never run; what would need running is refused with its line."""

from datetime import datetime

import pytest

from flotilla.importers.shell import read_script
from flotilla.shared.errors import InvalidSpec


def words(text: str, **fixed: str) -> list[str]:
    return read_script(text, fixed, source="run.sh").commands[-1].words


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
        ("L=(a 'b c')\nrun ${L[@]} ${#L[@]} ${L[1]} ${L[5]}", ["run", "a", "b", "c", "2", "b", "c"]),
        ("A=data/x.tar.gz\nrun ${A##*/} ${A#*/} ${A%.*} ${A%%.*} ${#A}", ["run", "x.tar.gz", "x.tar.gz",
                                                                          "data/x.tar", "data/x", "13"]),
        ("A=a.b.c\nrun ${A/./-} ${A//./-} ${A^^} ${A:2:1} ${A:+set} ${B:+set}x", ["run", "a-b.c", "a-b-c", "A.B.C", "b",
                                                                                 "set", "x"]),
        ("run a=$UNSET $UNSET \"$UNSET\"", ["run", "a=", ""]),
        ("A=x\nB=y\nrun $A/b-$B/c d=$A/$B/e '$A/b-$B/c'", ["run", "x/b-y/c", "d=x/y/e", "$A/b-$B/c"]),
        ("A=x\nB=\"$A  $A\n $A\"\nrun $B \"$B\"", ["run", "x", "x", "x", "x  x\n x"]),
        ("A=' x y '\nrun a$A\"b\"", ["run", "a", "x", "y", "b"]),
        ("run ${A:-$((1024 * 2))} $((7 / -2)) $((-7 % 3)) $((2 ** 3 == 8))", ["run", "2048", "-3", "-1", "1"]),
        ("run $'a\\tb' ", ["run", "a\tb"]),
        ('F=${T:-["a b.parquet"]}\nrun "$F"', ["run", "[a b.parquet]"]),
        ("F=\"${T:-['x','y']}\"\nrun \"$F\" \"${T:-p'q'}\" ${T:-p'q'}", ["run", "['x','y']", "p'q'", "pq"]),
        ("n=4\nrun ${q:-$(((n + 2) * 3))} \"${q:-$(((n + ${n}) * 3))}\"", ["run", "18", "24"]),
        ("run x \\\n  a=b \\\n", ["run", "x", "a=b"]),
        ("run a=1 \"${@:1}\" b=2", ["run", "a=1", "b=2"]),
        ("set -- p q r\nrun \"${@:2}\" ${@:1:1}", ["run", "q", "r", "p"]),
        ('L=(a b c d)\nrun "${L[@]:1:2}" ${L[@]:3}', ["run", "b", "c", "d"]),
        ('eval "$(conda shell.bash hook)"\nconda activate x\nrun', ["run"]),
        ('if [ "$#" -lt 2 ]; then echo usage; exit 1; fi\nN=$1\nshift 2\nrun a "$@"', ["run", "a"]),
        ('if [ -z "$1" ]; then exit 1; fi\nrun a', ["run", "a"]),
        ("if [ $NODE_RANK == 0 ]; then run head; else run ${RANK}; fi", ["run", "head"]),
        ("read -r -d '' C <<'EOF'\nmod $A\nEOF\nrun $C", ["run", "mod", "$A"]),
        ("set -- x y\nread -r -d '' C <<EOF\nmod $1 ${2}-$1 \\$1\nEOF\nrun $C", ["run", "mod", "x", "y-x", "\\$1"]),
        ("read -r -d '' C <<EOF\nmod --a 1 \\\n --b 2\nEOF\nrun $C", ["run", "mod", "--a", "1", "--b", "2"]),
    ],
)  # fmt: skip
def test_words_are_expanded_as_a_shell_does(text: str, expected: list[str]) -> None:
    found = read_script(text, {}, source="run.sh").commands

    assert expected in [command.words for command in found if command.problem is None]


def test_an_argument_that_a_script_asks_for_is_not_known() -> None:
    text = 'if [ "$#" -lt 2 ]; then exit 1; fi\nN=$1\nrun a=$N b=1 c=$2'

    found = read_script(text, {}, source="run.sh").commands[-1]

    assert found.words[2] == "b=1" and list(found.unknown) == [1, 3]


@pytest.mark.parametrize(
    ("text", "name", "variable"),
    [
        ("run a.b=$MISSING c.d=1", "a.b", "MISSING"),
        ('export GONE=\nL=(+a.b="${GONE}")\nrun "${L[@]}"', "a.b", "GONE"),
        ("run --size $1 --next", "--size", "1"),
        ("A=x\nrun a.b=$A", "a.b", None),
    ],
)
def test_it_is_known_which_variable_leaves_a_parameter_empty(text: str, name: str, variable: str | None) -> None:
    assert read_script(text, {}, source="run.sh").lacking(name) == variable


def test_a_variable_that_is_given_wins_over_the_script() -> None:
    assert words("A=x\nrun $A", A="mine") == ["run", "mine"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('M=async\nif [ "$M" = "async" ]; then\n  A=1\nelse\n  A=2\nfi\nrun $A', "1"),
        ("M=x\nif [[ $M == async ]]\nthen A=1\nelif [ $M != y ]; then A=2; else A=3; fi\nrun $A", "2"),
        ("M=x\nif test $M = y; then A=1; else export A=3; fi\nrun $A", "3"),
        ("N=8\nif [ $N -gt 4 ]; then if [ -n '' ]; then A=1; else A=2; fi; fi\nrun $A", "2"),
        ("A=0\nif [ ! -z $A ]; then A=1; fi\nrun $A", "1"),
        ("A=0\nif [ -f x ]; then B=1; fi\nrun $A", "0"),
        ("A=0\nfor i in 1 2; do sleep $i; B=$i; done\nrun $A", "0"),
        ("D=$(nproc)\nwhile nproc; do sleep 1; done\nrun 0 2>&1 | tee log.$(date)", "0"),
        ('case $D in\n a) B=1 ;;\n *) B=2 ;;\nesac\nrun 0', "0"),
        ("A=$(nproc)\nA=1\nrun $A", "1"),
        ("A=0\nif [ 1 = 1 ] && [ 2 = 2 ]; then A=1; fi\nrun $A", "1"),
        ("A=0\nif [ 1 = 1 ] && [ 2 = 3 ]; then A=1; fi\nrun $A", "0"),
        ("A=0\nif [ 1 = 2 ] && [ -f x ]; then A=1; fi\nrun $A", "0"),
        ("A=0\nif [ 1 = 2 ] || [ 2 = 2 ]; then A=1; fi\nrun $A", "1"),
        ("A=0\nif [ 1 = 1 ]; then A=1; elif [ 1 = 1 ] && [ -f x ]; then A=2; fi\nrun $A", "1"),
        ("A=0\nif [ 1 = 2 ]; then A=1; elif [ 1 = 1 ] && [ 2 = 2 ]; then A=2; fi\nrun $A", "2"),
        ("A=0\nif [ 1 = 2 ] && { [ 1 = 1 ] || [ 2 = 2 ] ; }; then A=1; fi\nrun $A", "0"),
        ("A=0\nif [ 1 = 1 ] && { [ 1 = 2 ] || [ 2 = 2 ] ; }; then A=1; fi\nrun $A", "1"),
        ("A=0\nif [ 1 = 2 ] && { [ -f x ] || [ 2 = 2 ]; } && [ -f y ]; then A=1; fi\nrun $A", "0"),
        ("A=0\nif [ 1 = 1 ] || { nproc; }; then A=1; fi\nrun $A", "1"),
        ("D=gpu\ncase $D in\n a) A=1 ;;\n npu | gpu) A=2 ;;\n *) A=3 ;;\nesac\nrun $A", "2"),
        ('D=tpu\ncase "${D}" in\n gpu|npu) A=1; B=1 ;;\n *)\n A=3\n ;;\nesac\nrun $A', "3"),
        ("D=x\nA=0\ncase $D in a) A=1 ;; b) A=2 ;; esac\nrun $A", "0"),
        ("D=h100-8\ncase $D in h100*) A=1;; [ab]*) A=2;; esac\nrun $A", "1"),
        ('D=a\nE=a\ncase $D in "b") A=1;; "$E") A=2;; esac\nrun $A', "2"),
        ("D=a\ncase $D in a) if [ 1 = 1 ]; then A=1; fi; case b in b) A=$A$A;; esac;; *) A=3;; esac\nrun $A", "11"),
        ("case $(date) in *) A=1;; esac\nrun $A", "1"),
        ("D=a\ncase $D in a) ;; *) exit 1 ;; esac\nrun 0", "0"),
        ("if [ 1 = 2 ]; then case $X in a) A=1;; *) A=2;; esac; else A=3; fi\nrun $A", "3"),
    ],
)  # fmt: skip
def test_conditions_on_known_values_are_followed(text: str, expected: str) -> None:
    found = read_script(text, {}, source="run.sh").commands

    assert [command.words for command in found if command.words[0] == "run" and not command.problem] == [
        ["run", expected]
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\nif [ -f x ]; then\nA=1\nfi\nrun $A", 3),
        ("if [ -f x ]; then\nA=1\nelse\nA=2\nfi\nrun $A", 4),
        ("A=3\nif [ -f x ]; then\nA=4\nfi\nrun ${A:-5}", 3),
        ("if [ -f x ]; then\nrun $A\nfi", 2),
        ("if [ 1 = 1 ] && [ -f x ]; then\nrun\nfi", 2),
        ("if [ 1 = 2 ] || [ -f x ]; then\nrun\nfi", 2),
        ("while [ -f x ] && [ 1 = 1 ]; do\nrun\ndone", 2),
        ("for i in $(ls); do\nrun $i; done", 2),
        ("for i in 1 2; do\nrun $i; break; done", 2),
        ("if [ 1 = 1 ] && { [ -f x ] || [ 1 = 2 ]; }; then\nA=1\nfi\nrun $A", 2),
        ("case $(nproc) in\n 8) A=1 ;;\n *) A=2 ;;\nesac\nrun $A", 3),
        ("case $(nproc) in\n 8) A=1 ;;\n 9) run ;;\nesac", 3),
        ('D=a\ncase $D in\n "a"*) A=1 ;;\nesac\nrun $A', 3),
        ("A=1\nB=$(nproc)\nrun $B", 2),
        ("A=1\nB=$(nproc)\nB+=1\nrun $B", 2),
        ("A=`nproc`\nL=($A)\nrun ${L[@]}", 1),
        ("set -u\nrun $UNSET", 2),
        ("set -euxo pipefail\nrun ${UNSET}", 2),
        ("run ${A:?must be}", 1),
        ("run ${!A}", 1),
        ("run $RANDOM", 1),
        ("run $((1 / 0))", 1),
        ("[ -f x ] && run", 1),
        ("f() { run $1; }\nf $(nproc)", 2),
        ("A=$(cat x | head)\nrun $A", 1),
    ],
)
def test_what_is_not_known_is_said_where_a_command_uses_it(text: str, line: int) -> None:
    (found,) = [command for command in read_script(text, {}, source="run.sh").commands if command.words[0] == "run"]

    assert found.problem is not None
    assert str(found.problem.errors[0]["path"]) == f"run.sh:{line}"


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("DEVICE=$(nproc)\ncase ${DEVICE} in\n gpu) A=1 ;;\nesac\nrun $A", "case ${DEVICE} in"),
        ('if [ -f "$X" ]; then\nA=1\nelse\nA=2\nfi\nrun $A', 'if [ -f "$X" ]'),
        ("if [ 1 = 2 ]; then\nA=1\nelif nproc; then\nA=2\nfi\nrun $A", "elif nproc"),
        ("if [ 1 = 1 ] && nproc; then\nA=1\nfi\nrun $A", "if [ 1 = 1 ] && nproc"),
        ("for i in $(ls); do\nA=$i\ndone\nrun $A", "for i in $(ls)"),
    ],
)
def test_a_value_that_depends_on_a_condition_names_it(text: str, condition: str) -> None:
    problem = read_script(text, {}, source="run.sh").commands[-1].problem

    assert problem is not None
    assert f"depends on `{condition}`, which is not known here: give NAME=VALUE" in str(problem.errors[0])


def test_an_element_that_is_not_known_hides_no_other_of_its_list() -> None:
    text = 'X=$(nproc)\nL=(a=1 b=$(nproc) c=$X)\nif [ -f x ]; then\nL+=(d=4)\nfi\nL+=(e=5)\nrun "${L[@]}" f=6'

    found = read_script(text, {}, source="run.sh").commands[-1]

    assert found.words == ["run", "a=1", "b=$(nproc)", "c=$X", "d=4", "e=5", "f=6"]
    assert [str(found.unknown[number].errors[0]["path"]) for number in sorted(found.unknown)] == [
        "run.sh:2", "run.sh:1", "run.sh:4",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("run 'open", 1),
        ("run $((1 +))", 1),
        ("eval $(nproc)", 1),
        ("f() { f; f; }\nf", 1),
        ("if [ 1 = 1 ]; then\ndone", 1),
    ],
)
def test_what_cannot_be_followed_is_a_message_with_its_line(text: str, line: int) -> None:
    with pytest.raises(InvalidSpec) as caught:
        read_script(text, {}, source="run.sh")

    assert str(caught.value.errors[0]["path"]).startswith(f"run.sh:{line}")


def test_a_condition_without_an_end_is_a_message() -> None:
    with pytest.raises(InvalidSpec, match="needs its end"):
        read_script("if [ 1 = 1 ]; then\nrun", {}, source="run.sh")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f() { A=$1; run $2; }\nf x y\nrun $A", [["run", "y"], ["run", "x"]]),
        ("function f {\n local A=2\n return\n run no\n}\nf\nrun yes", [["run", "yes"]]),
        ("( A=2; run $A )\nrun ${A:-3}", [["run", "2"], ["run", "3"]]),
        ("for i in a 'b c'; do run $i; done", [["run", "a"], ["run", "b", "c"]]),
        ('for i in a b; do L+=("x=$i"); done\nrun "${L[@]}"', [["run", "x=a", "x=b"]]),
        ("i=0\nwhile ((i < 2)); do run $i; i=$((i + 1)); done", [["run", "0"], ["run", "1"]]),
        ("while [[ $# -gt 0 ]]; do shift; done\nrun", [["run"]]),
        ("set -- a b\nshift\nrun $1 $#", [["run", "b", "1"]]),
        ('eval "run a"\nrun b', [["run", "a"], ["run", "b"]]),
        ("[ 1 = 2 ] && run a\n[ 1 = 1 ] && run b", [["run", "b"]]),
        ("A=x\nif [[ $A == x* && -n $A ]]; then run a; fi", [["run", "a"]]),
        ("if [[ -v A || 1 -gt 2 ]]; then run a; else run b; fi", [["run", "b"]]),
        ("if ! [ -z x ]; then run a; fi", [["run", "a"]]),
    ],
)  # fmt: skip
def test_functions_loops_and_subshells_are_followed(text: str, expected: list[list[str]]) -> None:
    found = read_script(text, {}, source="run.sh").commands

    assert [each.words for each in found if each.words[0] == "run" and each.problem is None] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('D=$(cd "$(dirname "$0")/../.." && pwd)\nrun $D/x', "./x"),
        ('D="$( cd -- "$(dirname "${BASH_SOURCE[0]}")" &> /dev/null && pwd )"\nrun $D/x', "examples/scripts/x"),
        ("cd examples\nrun $PWD/x $(pwd)", "examples/x"),
        ("run $(basename $0 .sh)", "run"),
        ("run $(echo a b | cat)$(echo c)", None),
        ("now() { date +%Y; }\nrun $(now)", str(datetime.now().astimezone().year)),
        ("D=${D:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}\nrun $D", "gpu"),
        ("D=$(python3 -c 'import torch' && echo a || echo b)\nrun $D", None),
    ],
)  # fmt: skip
def test_what_a_command_prints_is_known_where_it_only_changes_text(text: str, expected: str | None) -> None:
    found = read_script(text, {}, source="examples/scripts/run.sh").commands[-1]

    assert (found.problem is None and found.words[1]) == (expected if expected is not None else False)


def test_the_folder_of_a_script_is_known_where_its_path_says_it() -> None:
    text = 'D=$(dirname "$0")\nrun $D/x $(cd $D/.. && pwd)/x'

    found = read_script(text, {}, source="/tmp/somewhere/run.sh").commands[-1]

    assert list(found.unknown) == [1]
    assert found.words[2] == "./x"
