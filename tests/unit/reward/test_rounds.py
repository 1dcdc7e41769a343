# ruff: noqa: E501  programs
"""Judge and answer in memory; what a hostile program tries in its own process is tried in a real sandbox."""

import json
import sys
from typing import Any

import pytest

from flotilla.services.reward.verifiers.assertions.answer import Answer
from flotilla.services.reward.verifiers.assertions.judge import judge
from flotilla.services.reward.verifiers.assertions.rounds import Assertions, program_text
from flotilla.shared.errors import GradingFailed


class MemorySandbox:
    """Plays both programs, and counts its runs."""

    def __init__(self) -> None:
        self.runs: list[str] = []

    async def run(self, text: str, stdin: str) -> str | None:
        given = json.loads(stdin)
        if text == program_text("judge"):
            self.runs.append("judge")
            return json.dumps(judge(given["statements"], given["replies"]))
        self.runs.append("answer")
        lines = ["true\n"]
        answer = Answer()
        try:
            answer.load(given["program"])
            lines += [json.dumps(answer.reply(request)) + "\n" for request in given["requests"]]
        except SystemExit:
            return "".join(lines) if len(lines) > 1 else ""
        return "".join(lines)


@pytest.fixture(autouse=True)
def main_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


async def hold(program: str, statements: str, sandbox: MemorySandbox | None = None) -> bool:
    return await Assertions().hold(program, statements, (sandbox or MemorySandbox()).run)


CLASS = """
class Stack:
    def __init__(self, *items): self.items = list(items)
    def push(self, item): self.items.append(item); return self
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, index): return self.items[index]
    def __add__(self, other): return Stack(*self.items, *other.items)
"""
ALIKE = "class A:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
HONEST: list[tuple[str, str]] = [
    ("def add(a, b): return a + b", "assert add(1, 2) == 3"),
    ("def f(x): return x * x", "for i in range(20):\n    assert f(i) == i ** 2"),
    ("def f(x): return x * x", "x = f(3)\nassert f(x) == 81"),
    ("def root(x): return x ** .5", "assert abs(root(2) - 1.41421) < 1e-4"),
    ("def root(x): return x ** .5", "import math\nassert math.isclose(root(2), math.sqrt(2))"),
    ("import math\ndef root(x): return math.sqrt(x)", "assert math.isclose(root(4), 2) and isclose(root(9), 3)"),
    ("def top(xs): return sorted(xs, reverse=True)", "assert sorted(top([2, 1, 3])) == [1, 2, 3]"),
    ("def order(xs): xs.sort()", "a = [3, 1, 2]\nassert order(a) is None\nassert a == [1, 2, 3]"),
    ("def put(m):\n    m[0][1] = 5\n    m.append([7])", "m = [[0, 0]]\nrow = m[0]\nput(m)\nassert m == [[0, 5], [7]]"),
    ("def put(m): m[0][1] = 5", "m = [[0, 0]]\nrow = m[0]\nput(m)\nassert row == [0, 5]"),
    ("def twice(f, x): return f(f(x))", "assert twice(lambda n, k=2: n * k, 3) == 12"),
    ("def parse(kind, text): return kind(text)", "assert parse(int, '12') == 12"),
    ("def check_it(x): return x", "def check(candidate):\n    assert candidate(2) == 2\ncheck(check_it)"),
    ("def f(x): raise ValueError('no')", "try:\n    f(1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'no'"),
    ("def gen(n):\n    for i in range(n): yield i", "assert list(gen(4)) == [0, 1, 2, 3]"),
    ("def f(): return {1: (2, 3.5, {4}), 'b': [None, b'x', 1j]}", "assert f() == {1: (2, 3.5, {4}), 'b': [None, b'x', 1j]}"),
    ("def f(): return 2 ** 5000", "assert f() == 2 ** 5000"),
    ("def f(): return float('inf'), float('nan')", "assert f()[0] == float('inf') and f()[1] != f()[1]"),
    ("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)", "assert f() == (1, 2) and f().y == 2"),
    ("from collections import Counter\ndef f(s): return Counter(s)", "assert f('aab') == {'a': 2, 'b': 1}\nassert f('aab').most_common(1) == [('a', 2)]"),
    (CLASS, "s = Stack(1)\ns.push(2).push(3)\nassert len(s) == 3 and s[1] == 2 and list(s) == [1, 2, 3]\nassert s"),
    (CLASS, "assert list((Stack(1) + Stack(2)).items) == [1, 2]\nassert isinstance(Stack(), Stack)\nassert not Stack()"),
    ("def pow(a, b): return a ** b", "assert pow(2, 3) == 8"),
    ("LIMIT = 7", "assert LIMIT == 7"),
    ("def f(x): print('noise'); return x", "assert f('\\ud800') == '\\ud800'"),
    ("if __name__ == '__main__':\n    READY = True", "assert READY"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "statements"), HONEST)
async def test_a_right_program_passes(program: str, statements: str) -> None:
    assert await hold(program, statements)


WRONG: list[tuple[str, str]] = [
    ("def add(a, b): return a - b", "assert add(1, 2) == 3"),
    ("def f(x): return x * x if x < 15 else 0", "for i in range(20):\n    assert f(i) == i ** 2"),
    (ALIKE + "def add(a, b): return A()", "assert add(1, 2) == 3"),
    (ALIKE + "def add(a, b): return A()", "assert not (add(1, 2) != 3)"),
    (ALIKE + "def add(a, b): return A()", "assert 3 == add(1, 2)"),
    (ALIKE + "def add(a, b): return [A()]", "assert add(1, 2) == [3]"),
    (ALIKE + "def add(a, b): return A()", "assert add(1, 2) in (3, 4)"),
    ("class I(int):\n    def __eq__(s, o): return True\ndef add(a, b): return I(0)", "assert add(1, 2) == 3"),
    ("class L(list):\n    def __eq__(s, o): return True\ndef f(): return L()", "assert f() == [3]"),
    ("class F(float):\n    def __sub__(s, o): return 0\ndef root(x): return F()", "assert abs(root(2) - 1.41) < 1e-3"),
    ("class F(float):\n    def __rsub__(s, o): return 0\ndef root(x): return F()", "assert abs(1.41 - root(2)) < 1e-3"),
    ("class S(str):\n    def startswith(s, o): return True\ndef f(x): return S()", "assert f(2).startswith('ab')"),
    ("class S(set):\n    def issubset(s, o): return True\ndef f(x): return S()", "assert f(2).issubset({1})"),
    ("class S(list):\n    def __contains__(s, o): return True\ndef f(x): return S()", "assert 3 in f(2)"),
    ("class S(list):\n    def __len__(s): return 2\ndef f(x): return S()", "assert f(2) == [1, 2]"),
    ("class S(list):\n    def __getitem__(s, i): return [1, 2]\ndef f(x): return S()", "assert f(2)[3:5] == [8, 9]"),
    ("class S(list):\n    def sort(s, key): pass\ndef f(x): return S()",
     "def g(k):\n    x = f(2)\n    x.sort(key=lambda v: v * k)\n    assert x == [1]\ng(2)"),
    ("class M(type):\n    def __instancecheck__(c, o): return True\nclass int(metaclass=M): pass\ndef f(x): return 'a'",
     "assert isinstance(f(2), int)"),
    ("def abs(x): return 0\ndef root(x): return 9", "assert abs(root(2) - 1.41) < 1e-3"),
    ("def sorted(x): return [1, 2]\ndef top(x): return []", "assert sorted(top([2, 1])) == [1, 2]"),
    ("def isclose(*a): return True\ndef root(x): return 9", "assert isclose(root(2), 1.41)"),
    ("class math:\n    isclose = lambda *a: True\ndef root(x): return 9", "assert math.isclose(root(2), 1.41)"),
    ("def f(x): raise AssertionError", "assert f(1) == 1"),
    ("def f(x): raise SystemExit(0)", "assert f(1) == 1"),
    ("raise SystemExit(0)", "assert f(1) == 1"),
    ("", "assert f(1) == 1"),
    ("def f(x): return x", "assert f(1) == 1\nassert f(2) == 3"),
    ("def f(x): return x", "assert f(1) == 1\nraise SystemExit(0)"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "statements"), WRONG)
async def test_a_wrong_program_fails_whatever_it_defines(program: str, statements: str) -> None:
    assert not await hold(program, statements)


@pytest.mark.parametrize(
    "lines",
    ["", "true\n", "true\nnonsense\n", 'true\n["raises", "SystemExit", ""]\n', "true\n[[[[\n", "true\n" + "[" * 5000 + "\n",
     'true\n[["decimal"], []]\n', 'true\n[["int", "0x3"], []', 'true\n[["namedtuple", ["__class__"], [1]], []]\n',
     'true\n{"passed": true}\n', 'true\n[["ref", 0, 0], []]\n', 'true\n[["code", ""], []]\n', 'true\n[["global", "x"], []]\n'],
)  # fmt: skip
async def test_what_a_program_forges_is_no_proof(lines: str) -> None:
    sandbox = MemorySandbox()

    async def run(text: str, stdin: str) -> str | None:
        return lines if text == program_text("answer") else await sandbox.run(text, stdin)

    assert not await Assertions().hold("", "assert f(1) == 3", run)


@pytest.mark.parametrize(
    ("statements", "reason"),
    [
        ("assert f(1", "SyntaxError"),
        ("class P: pass\nassert f(P()) == 1", "object of its own"),
        ("import no_such_module\nassert f(1) == 1", "no_such_module"),
        ("assert 1 == 2", "without asking"),
        ("k = 3\ndef g():\n    k = 4\n    assert f(lambda x: x + k) == 1\ng()", "variables around it"),
    ],
)
async def test_a_label_that_cannot_be_judged_says_why(statements: str, reason: str) -> None:
    with pytest.raises(GradingFailed, match=reason):
        await hold("def f(x): return 1", statements)


async def test_a_label_takes_one_run_of_the_program_and_one_of_the_judge_once_it_is_known() -> None:
    sandbox, assertions = MemorySandbox(), Assertions()
    statements = "for i in range(9):\n    assert f(i) == i\n    assert g(i) == -i"
    program = "def f(x): return x\ndef g(x): return -x"

    assert await assertions.hold(program, statements, sandbox.run)
    assert sandbox.runs == ["judge", "answer", "judge"]
    assert await assertions.hold(program, statements, sandbox.run)
    assert sandbox.runs[3:] == ["answer", "judge"]


async def test_no_expected_value_is_given_to_the_program() -> None:
    seen: list[Any] = []
    sandbox = MemorySandbox()

    async def run(text: str, stdin: str) -> str | None:
        if text == program_text("answer"):
            seen.append(stdin)
        return await sandbox.run(text, stdin)

    await Assertions().hold("def f(x): return x", "secret = 74123\nassert f(1) == secret, 'secret'", run)

    assert seen
    assert not any("74123" in each or "secret" in each for each in seen)
