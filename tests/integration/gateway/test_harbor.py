"""Harbor's tasks in boxes, played by harnesses against a gateway and a rollout behind sockets."""

import shlex
import shutil
from pathlib import Path, PurePosixPath

import pytest

from flotilla.agents.box import open_box, why_not
from flotilla.agents.episodes import Episode, EpisodeLost, Verdict
from flotilla.agents.harbor import TASK, HarborAgent, Harness, read_tasks, task_rows
from flotilla.shared.errors import InvalidSpec, Unavailable
from tests.agent_fleet import agent_fleet, play_named, play_rows
from tests.fleet import ROOT
from tests.unit.rollout.agents.world import a_spec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=f"there are no boxes here: {why_not()}"),
]

EXAMPLE = ROOT / "examples" / "harbor"
PASSES = "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"


def a_task(path: Path, *, tests: str = PASSES, config: str = "", instruction: str = "Do it.") -> Path:
    files = {"task.toml": config, "instruction.md": instruction, "tests/test.sh": tests}
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


async def played(path: Path, command: str, task: str | None = None) -> Verdict:
    """Play one episode whose endpoint nobody asks."""
    tasks = read_tasks(path)
    name = task or next(iter(tasks))
    episode = Episode("e1", "the-key", "http://127.0.0.1:9/v1", "policy", {"metadata": {TASK: name}})
    return await HarborAgent(tasks, Harness(command, seconds=20.0))(episode)


def solved(prompt: str) -> str:
    """Solve the even problems, and no other."""
    number = int(prompt.rpartition("What is ")[2].split()[0])
    return f"#### {number + 1}~" if number % 2 == 0 else "no idea~"


async def test_the_examples_tasks_are_played_and_their_tests_grade(tmp_path: Path) -> None:
    from examples.harbor.make_tasks import write_task

    for number in range(3):
        write_task(tmp_path / f"sum-{number}", f"What is {number} plus 1?", str(number + 1))
    tasks = read_tasks(tmp_path)
    agent = HarborAgent(tasks, Harness(f"python3 {EXAMPLE / 'harness.py'}", readable=[EXAMPLE]))

    async with agent_fleet(a_spec(group_size=2), solved) as fleet:
        rewards = await play_rows(fleet, agent, list(task_rows(tasks)))

    assert rewards == [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]


async def test_a_spec_names_the_tasks_and_their_agent_is_started_and_ended(tmp_path: Path) -> None:
    from examples.harbor.make_tasks import write_task

    for number in range(2):
        write_task(tmp_path / f"sum-{number}", f"What is {number} plus 1?", str(number + 1))
    harness = {"harness": f"python3 {EXAMPLE / 'harness.py'}", "readable": [str(EXAMPLE)], "parallel": 2}
    spec = a_spec(group_size=2, environment={"kind": "harbor", "tasks": str(tmp_path), **harness})

    async with agent_fleet(spec, solved) as fleet:
        rewards = await play_named(fleet, list(task_rows(read_tasks(tmp_path))))

    assert rewards == [[1.0, 1.0], [0.0, 0.0]]


@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="there is no python3 below /usr")
@pytest.mark.parametrize("is_closed", [True, False])
async def test_a_closed_box_reaches_the_policy_and_nothing_else(tmp_path: Path, is_closed: bool) -> None:
    from examples.harbor.make_tasks import write_task

    write_task(tmp_path / "tasks" / "sum", "What is 2 plus 1?", "3")
    tasks = read_tasks(tmp_path / "tasks")
    (tmp_path / "kept").mkdir()

    async with agent_fleet(a_spec(group_size=1), solved) as fleet:
        reach = f"(exec 3<>/dev/tcp/127.0.0.1/{fleet.url.rpartition(':')[2]}) && echo reached > reached"
        look = f"bash -c {shlex.quote(reach)}; grep -o '^ *[a-z0-9]*:' /proc/net/dev > interfaces"
        command = f"python3 {EXAMPLE / 'harness.py'}; {look}"
        harness = Harness(command, readable=[EXAMPLE], keep=tmp_path / "kept", is_closed=is_closed)
        rewards = await play_rows(fleet, HarborAgent(tasks, harness), list(task_rows(tasks)))

    app = next((tmp_path / "kept").glob("*/root/app"))
    assert rewards == [[1.0]]
    assert (app / "reached").exists() is not is_closed
    assert ((app / "interfaces").read_text().split() == ["lo:"]) or not is_closed


@pytest.mark.skipif(shutil.which("curl", path="/usr/bin") is None, reason="curl is absent")
async def test_a_harness_may_speak_anthropics_messages(tmp_path: Path) -> None:
    a_task(tmp_path / "t", tests='#!/bin/sh\ngrep -c "It is" /app/said > /logs/verifier/reward.txt\n')
    body = (
        '{"model": "\'"$MODEL"\'", "max_tokens": 64, "messages": [{"role": "user", "content": "\'"$INSTRUCTION"\'"}]}'
    )
    ask = f"curl -sf $ANTHROPIC_BASE_URL/v1/messages -H \"x-api-key: $ANTHROPIC_API_KEY\" -d '{body}' > said"
    tasks = read_tasks(tmp_path)

    async with agent_fleet(a_spec(group_size=1), lambda _: "It is so~") as fleet:
        rewards = await play_rows(fleet, HarborAgent(tasks, Harness(ask)), list(task_rows(tasks)))

    assert rewards == [[1.0]]


async def test_what_a_harness_starts_is_there_for_the_tests_and_the_tests_are_not_there_for_it(tmp_path: Path) -> None:
    tests = (
        '#!/bin/sh\nkill -0 "$(cat /app/pid)" && [ "$(cat /app/seen)" = "" ] && [ "$GIVEN" = yes ] && cat /tests/more '
        "> /logs/verifier/reward.json\n"
    )
    path = a_task(tmp_path / "t", tests=tests, config='[verifier]\nenv = { GIVEN = "yes" }')
    (path / "tests" / "more").write_text('{"reward": 0.5, "style": 2}')

    verdict = await played(tmp_path, "(sleep 60 & echo $! > pid); ls /tests > seen")

    assert verdict.reward == 0.5
    assert verdict.metrics == {"style": 2.0, "harness_timed_out": 0.0, "harness_failed": 0.0}


@pytest.mark.parametrize(
    ("tests", "config", "command", "reason"),
    [
        ("#!/bin/sh\necho broken; exit 3\n", "", "true", r"wrote no reward \(status 3\): broken"),
        (PASSES.replace("echo 1", "echo much"), "", "true", "no number"),
        ("#!/bin/sh\nsleep 60\n", "[verifier]\ntimeout_sec = 0.3", "true", "took longer than 0.3 s"),
        (PASSES, "", "kill -9 -1", "the episode's box has ended"),
        ("#!/bin/sh\ntrue\n", "", "ln -s /etc/hostname /logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.json",
         "wrote no reward"),
        ("#!/bin/sh\nln -s /tests/one /logs/verifier/reward.txt\n", "", "true", "wrote no reward"),
    ],
)  # fmt: skip
async def test_what_has_no_reward_of_the_tests_is_lost_and_never_a_zero(
    tmp_path: Path, tests: str, config: str, command: str, reason: str
) -> None:
    a_task(tmp_path / "t", tests=tests, config=config)

    with pytest.raises(EpisodeLost, match=reason):
        await played(tmp_path, command)


@pytest.mark.parametrize(
    ("command", "timed_out", "failed"), [("exit 3", 0.0, 1.0), ("touch begun; sleep 60", 1.0, 0.0)]
)
async def test_a_harness_that_fails_or_takes_too_long_is_graded_by_what_it_left(
    tmp_path: Path, command: str, timed_out: float, failed: float
) -> None:
    a_task(tmp_path / "t", config="[agent]\ntimeout_sec = 0.5")

    verdict = await played(tmp_path, command)

    assert verdict == Verdict(1.0, {"harness_timed_out": timed_out, "harness_failed": failed})


async def test_a_harness_that_is_not_there_and_a_row_of_other_tasks_end_all(tmp_path: Path) -> None:
    a_task(tmp_path / "t")

    with pytest.raises(InvalidSpec, match=r"cannot be run in a box .* not found"):
        await played(tmp_path, "no-such-harness")
    with pytest.raises(InvalidSpec, match="harbor-rows"):
        await played(tmp_path, "true", task="another")


async def test_a_box_sees_nothing_of_the_machine_but_its_programs(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "file").write_text("g")
    look = (
        f"cat {tmp_path}/secret; cat {tmp_path}/given/file; echo x > {tmp_path}/given/file; ls /proc | grep -c '^[0-9]'"
    )

    async with open_box([], readable=[tmp_path / "given"]) as box:
        where = PurePosixPath("/app")
        await box.run(look, folder=where, variables={}, output="/logs/agent/said", seconds=10.0)
        said = (box.read("agent", "said") or "").splitlines()
        folder = box._folder
        with pytest.raises(Unavailable):
            await box.run("kill -9 -1", folder=where, variables={}, output="/logs/agent/said", seconds=10.0)

    assert "No such file" in said[0]
    assert said[1].startswith("g")
    assert "Read-only" in "".join(said)
    assert int(said[-1]) < 10
    assert (tmp_path / "given" / "file").read_text() == "g"
    assert not folder.exists()
