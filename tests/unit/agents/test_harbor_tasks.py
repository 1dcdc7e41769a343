"""Harbor's task folders: what is taken of them, and what is refused by name."""

from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from flotilla.agents.episodes import Episode, EpisodeLost
from flotilla.agents.harbor import TASK, HarborAgent, Harness, read_tasks, rewards_of, task_rows
from flotilla.agents.harbor_tasks import HarborTask, read_task
from flotilla.shared.errors import InvalidSpec

DOCKERFILE = """
# syntax=docker/dockerfile:1
FROM ubuntu:24.04 AS base
ENV SEED=7 \\
    NAME="a b"
ENV OLD style
WORKDIR /srv
WORKDIR work
COPY --chown=root:root data /srv/data/
COPY a.txt b.txt ./
COPY ["a.txt", "/etc/renamed"]
CMD ["bash"]
"""


def a_folder(path: Path, config: str = 'version = "1.0"', dockerfile: str | None = None) -> Path:
    files = {
        "task.toml": config,
        "instruction.md": "<!-- a canary of the benchmark -->\n\nSay hello.\n",
        "tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n",
        "environment/a.txt": "a",
        "environment/b.txt": "b",
        "environment/data/one": "1",
    } | ({} if dockerfile is None else {"environment/Dockerfile": dockerfile})
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


def read(path: Path, config: str = "", dockerfile: str | None = None, *, skip_run: bool = False) -> HarborTask:
    folder = a_folder(path / "hello", config, dockerfile)
    return read_task(folder, skip_run=skip_run, readable=["OF_THE_HOST", "NOT_THERE"])


def test_a_task_is_what_its_files_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_HOST", "h")
    config = """
        [agent]
        timeout_sec = 30.0
        [verifier]
        timeout_sec = 12.5
        env = { A = "${OF_THE_HOST}/${NOT_THERE:-d}" }
        [environment]
        cpus = 1
        env = { B = "b" }
    """
    task = read(tmp_path, config, DOCKERFILE)
    environment = tmp_path / "hello" / "environment"

    assert (task.name, task.instruction) == ("hello", "Say hello.")
    assert (task.agent_seconds, task.verifier_seconds) == (30.0, 12.5)
    assert task.verifier_variables == {"A": "h/d"}
    assert task.image.variables == {"SEED": "7", "NAME": "a b", "OLD": "style", "B": "b"}
    assert task.image.workdir == PurePosixPath("/srv/work")
    assert [(source.relative_to(environment).as_posix(), str(place)) for source, place in task.image.copies] == [
        ("data", "/srv/data"),
        ("a.txt", "/srv/work/a.txt"),
        ("b.txt", "/srv/work/b.txt"),
        ("a.txt", "/etc/renamed"),
    ]


@pytest.mark.parametrize(
    ("config", "is_closed"),
    [
        ("[environment]\nallow_internet = false", True),
        ("[environment]\nnetwork_mode = 'no-network'", True),
        ("[environment]\nallow_internet = false\nnetwork_mode = 'public'", False),
        ("[agent]\nnetwork_mode = 'public'", False),
    ],
)
def test_a_task_without_a_network_is_played_without_one(tmp_path: Path, config: str, is_closed: bool) -> None:
    assert read(tmp_path, config).is_closed is is_closed


def test_a_task_that_says_nothing_works_in_app(tmp_path: Path) -> None:
    task = read(tmp_path)

    assert (task.image.workdir, task.image.copies) == (PurePosixPath("/app"), [])
    assert (task.agent_seconds, task.verifier_seconds) == (None, 600.0)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("[[steps]]\nname = 'one'", "several steps"),
        ("[environment]\nos = 'windows'", "the system windows"),
        ("[environment]\ndocker_image = 'a:b'", "docker_image"),
        ("[environment]\ngpus = 1", "accelerators"),
        ("[environment]\nnetwork_mode = 'allowlist'", "the network allowlist"),
        ("[agent]\nnetwork_mode = 'no-network'", "the network no-network beside public"),
        ("[agent]\nuser = 'somebody'", "not root"),
        ("[verifier]\nenvironment_mode = 'separate'", "tests in an environment of their own"),
        ("[verifier]\nenv = { A = '${NOT_THERE}' }", "environment variable NOT_THERE"),
        ("[agent]\ntimeout_sec = -1", "timeout_sec"),
        ("[agent]\ntimeout_sec = inf", "timeout_sec"),
        ("version =", "hello"),
    ],
)
def test_what_a_box_has_not_is_refused_by_name(tmp_path: Path, config: str, reason: str) -> None:
    with pytest.raises(InvalidSpec, match=reason) as refused:
        read(tmp_path, config)

    assert "Harbor task hello" in refused.value.detail


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("RUN apt-get install -y jq", "--skip-run"),
        ("COPY --from=base /a /b", "own environment folder alone"),
        ("COPY ../task.toml /app/", "outside of the task|there is no"),
        ("COPY nothing /app/", "there is no nothing"),
        ("COPY a.txt", "names what is copied"),
        ("COPY [1, 2]", "names what is copied"),
        ('COPY ["a.txt", "/app/"', "Expecting"),
        ("ENV", "names a variable"),
        ("USER somebody", "not done in a box"),
        ("ARG VERSION", "not done in a box"),
    ],
)
def test_what_makes_an_image_is_refused_with_its_line(tmp_path: Path, line: str, reason: str) -> None:
    with pytest.raises(InvalidSpec, match=reason) as refused:
        read(tmp_path, dockerfile=f"FROM ubuntu\n{line}\n")

    assert "hello/environment/Dockerfile:2" in refused.value.detail


def test_services_are_refused_and_a_run_line_may_be_taken_as_done(tmp_path: Path) -> None:
    task = read(tmp_path, dockerfile="FROM ubuntu\nRUN apt-get update \\\n  && apt-get install -y jq\n", skip_run=True)
    (tmp_path / "hello" / "environment" / "docker-compose.yaml").write_text("services: {}")

    assert task.image.copies == []
    with pytest.raises(InvalidSpec, match="services"):
        read_task(tmp_path / "hello")


def test_tasks_are_found_by_their_folders_and_make_rows(tmp_path: Path) -> None:
    for name in ("b", "a"):
        a_folder(tmp_path / name)
    (tmp_path / "notes").mkdir()

    tasks = read_tasks(tmp_path)

    assert list(tasks) == ["a", "b"]
    assert list(read_tasks(tmp_path / "a")) == ["a"]
    assert next(iter(task_rows(tasks))) == {"prompt": [{"role": "user", "content": "Say hello."}], TASK: "a"}
    with pytest.raises(InvalidSpec, match="no Harbor task"):
        read_tasks(tmp_path / "notes")


@pytest.mark.parametrize(
    ("written", "rewards"),
    [
        ("1\n", {"reward": 1.0}),
        (".5", {"reward": 0.5}),
        ('{"score": 0.25}', {"reward": 0.25}),
        ('{"reward": 1, "style": 0.5}', {"reward": 1.0, "style": 0.5}),
    ],
)
def test_rewards_are_read_as_harbor_reads_them(written: str, rewards: dict[str, float]) -> None:
    assert rewards_of(written, "reward.txt") == rewards


@pytest.mark.parametrize(
    "written",
    [
        "", "nan", "yes", "{}", '{"reward": "high"}', '{"reward": 1e999}', "{", "[1]",
        '{"reward": 1' + "0" * 400 + "}", '{"reward": ' + "[" * 5000,
    ],
)  # fmt: skip
def test_what_is_no_number_is_no_reward(written: str) -> None:
    with pytest.raises(EpisodeLost):
        rewards_of(written, "reward.txt")


def test_a_task_reads_no_variable_of_this_process_that_is_not_named_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOTILLA_TOKEN", "secret")
    folder = a_folder(tmp_path / "a", 'verifier.env = { A = "${FLOTILLA_TOKEN:-none}" }')
    asking = a_folder(tmp_path / "b", 'verifier.env = { A = "${FLOTILLA_TOKEN}" }')

    assert read_task(folder).verifier_variables == {"A": "none"}
    with pytest.raises(InvalidSpec, match=r"task b asks for .* FLOTILLA_TOKEN: `--secret FLOTILLA_TOKEN`"):
        read_task(asking)
    assert read_task(asking, readable=["FLOTILLA_TOKEN"]).verifier_variables == {"A": "secret"}


@pytest.mark.parametrize("config", ['verifier.env = { "A; id" = "1" }', 'environment.env = { "A B" = "1" }'])
def test_a_variable_has_a_name(tmp_path: Path, config: str) -> None:
    with pytest.raises(InvalidSpec, match="is no name"):
        read(tmp_path, config)


def test_no_copy_goes_above_the_root(tmp_path: Path) -> None:
    task = read(tmp_path, dockerfile="COPY a.txt ../../../../etc/cron.d/a\n")

    assert [str(place) for _, place in task.image.copies] == ["/etc/cron.d/a"]


class Ending:
    """A box whose commands end with these statuses."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)

    async def run(self, command: str, **_: object) -> int:
        return self.statuses.pop(0)

    def read(self, name: str, file: str) -> str:
        return "not found"


async def test_a_harness_that_has_run_once_is_there_whatever_a_policy_ends_it_with(tmp_path: Path) -> None:
    agent = HarborAgent(read_tasks(a_folder(tmp_path / "a")), Harness("harness"))
    episode = Episode("e", "k", "http://127.0.0.1:9/v1", "m", {})
    box: Any = Ending(127, 0, 127)

    with pytest.raises(InvalidSpec, match=r"cannot be run in a box \(status 127\): not found"):
        await agent._play(box, agent._tasks["a"], episode, episode.base_url)

    assert [await agent._play(box, agent._tasks["a"], episode, episode.base_url) for _ in range(2)] == [0, 127]
