"""What programs of callers that have used much may use, while others want the processors and while they do not."""

import pytest

from flotilla.services.sandbox.spare_time import LEAST_PROCESSORS, SpareTime, busy_seconds, name_caller
from flotilla.shared.clock import ManualClock

PROCESSORS = 4.0
LEAST = 0.1


class Machine:
    """A machine, and the programs on it."""

    def __init__(self, *, least: float = LEAST) -> None:
        self.clock = ManualClock(1000.0)
        self.busy = 5000.0
        self.spare = SpareTime(
            PROCESSORS, least=least, now=self.clock.monotonic, busy=lambda: self.busy, own=lambda: 0.0
        )

    def go_on(self, seconds: float, *, others: float, programs: "dict[Program, float] | None" = None) -> None:
        """Let time pass: others use a part of the machine, and programs so many processors each."""
        for _ in range(int(seconds)):
            self.clock.advance(1.0)
            self.busy += others * PROCESSORS
            for program, processors in (programs or {}).items():
                self.busy += processors
                program.uses += processors
                self.spare.weigh(program, program.caller)


class Program:
    """A program in a group of its own."""

    def __init__(self, machine: Machine, caller: str) -> None:
        self._machine = machine
        self.caller = caller
        self.uses = 0.0
        self.processors: float | None = None
        machine.spare.weigh(self, caller)

    def count(self) -> None:
        used, self.uses = self.uses, 0.0
        self._machine.spare.use(self.caller, used)

    def bound(self, processors: float | None) -> None:
        self.processors = processors


def test_who_uses_much_of_an_idle_machine_is_not_bounded() -> None:
    machine = Machine()
    program = Program(machine, "big")

    machine.go_on(60, others=0.2, programs={program: 2.0})

    assert program.processors is None
    assert not machine.spare.is_bounded("big")


def test_who_uses_much_while_others_want_the_machine_is_bounded_and_who_uses_little_is_not() -> None:
    machine = Machine()
    flood, honest = Program(machine, "flood"), Program(machine, "honest")

    machine.go_on(20, others=0.8, programs={flood: 0.6, honest: 0.1})

    assert flood.processors == pytest.approx(LEAST * PROCESSORS)
    assert honest.processors is None


def test_programs_of_one_caller_share_its_part_and_callers_share_the_whole() -> None:
    machine = Machine()
    programs = [Program(machine, caller) for caller in ("flood", "flood", "other")]

    machine.go_on(20, others=0.8, programs=dict.fromkeys(programs, 0.4))

    assert [program.processors for program in programs] == pytest.approx([0.1, 0.1, 0.2])


def test_the_bound_grows_as_others_leave_more_of_the_machine_and_goes_when_they_leave_most_of_it() -> None:
    machine = Machine()
    program = Program(machine, "flood")
    machine.go_on(20, others=0.8, programs={program: 0.6})

    machine.go_on(60, others=0.325, programs={program: 0.6})
    between = program.processors
    machine.go_on(60, others=0.2, programs={program: 0.6})

    assert between == pytest.approx((1 + LEAST) / 2 * PROCESSORS, rel=0.01)
    assert program.processors is None


def test_what_programs_use_themselves_is_nobody_elses_want() -> None:
    machine = Machine()
    programs = {Program(machine, "big"): PROCESSORS / 2, Program(machine, "bigger"): PROCESSORS / 2}

    machine.go_on(60, others=0.0, programs=programs)

    assert [program.processors for program in programs] == [None, None]


def test_nobody_is_bounded_when_a_program_is_over_or_the_bound_is_off() -> None:
    machine, unbounded = Machine(), Machine(least=1.0)
    program, other = Program(machine, "flood"), Program(unbounded, "flood")

    machine.go_on(20, others=0.8, programs={program: 0.6})
    unbounded.go_on(20, others=0.8, programs={other: 0.6})
    machine.spare.end(program)

    assert (program.processors, other.processors) == (None, None)


def test_a_program_of_the_usual_limit_gets_its_time_on_a_small_machine() -> None:
    machine = Machine(least=0.001)
    program = Program(machine, "flood")

    machine.go_on(20, others=0.8, programs={program: 0.6})

    assert program.processors == pytest.approx(LEAST_PROCESSORS)


def test_programs_of_the_experiment_that_the_sandbox_is_there_for_are_not_bounded() -> None:
    machine = Machine()
    machine.spare.own_experiment = "exp-1"
    own, other = (Program(machine, name_caller("digest", name)) for name in ("exp-1", "exp-2"))

    machine.go_on(20, others=0.8, programs={own: 0.4, other: 0.4})

    assert (own.processors, other.processors) == (None, pytest.approx(LEAST * PROCESSORS))


def test_who_stops_is_let_go_soon() -> None:
    machine = Machine()
    program = Program(machine, "flood")
    machine.go_on(600, others=0.8, programs={program: 0.6})
    machine.spare.end(program)

    machine.go_on(25, others=0.8)

    assert not machine.spare.is_bounded("flood")


def test_the_machine_is_busy_with_all_but_waiting() -> None:
    text = "cpu  100 20 300 9000 50 6 7 8 3 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n"

    assert busy_seconds(text) == pytest.approx((100 + 20 + 300 + 6 + 7 + 8) / 100)
