"""Log files of several processes become one stream in the order of time."""

import asyncio
import json
from pathlib import Path

import pytest

from flotilla.cli.__main__ import main
from flotilla.cli.command_line import build_parser
from flotilla.cli.commands.logs import logs
from flotilla.cli.exit_codes import ExitCode
from flotilla.cli.log_lines import Tail, last_lines, parse, plain
from flotilla.cli.log_rotation import older_log, rotate


def record(second: int, message: str, level: str = "info", **facts: object) -> str:
    at = f"2026-01-01T00:00:{second:02}Z"
    return json.dumps({"at": at, "level": level, "service": "x", "logger": "y", "message": message, **facts})


def write(data: Path, **lines: list[str]) -> Path:
    (data / "logs").mkdir(parents=True, exist_ok=True)
    for name, texts in lines.items():
        (data / "logs" / f"{name.replace('_', '-')}.log").write_text("".join(f"{text}\n" for text in texts))
    return data


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(
        tmp_path,
        gateway=[record(1, "first"), record(4, "fourth", "warning", cause="a \x1b[31mred one")],
        rollout_0=[record(2, "second"), "Traceback: out of memory"],
        rollout_1=[record(3, "third", "error", exception="Traceback\n  ValueError: x\n")],
    )


def said(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["logs", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_lines_of_all_processes_come_in_the_order_of_time(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "--data", str(data))

    assert lines == [
        "00:00:01 gateway    info    first",
        "00:00:02 rollout-0  info    second",
        "         rollout-0          Traceback: out of memory",
        "00:00:03 rollout-1  error   third",
        "    Traceback",
        "      ValueError: x",
        "00:00:04 gateway    warning fourth cause=a \\x1b[31mred one",
    ]


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["rollout"], ["second", "Traceback: out of memory", "third"]),
        (["rollout-1"], ["third"]),
        (["--level", "warning"], ["Traceback: out of memory", "third", "fourth"]),
        (["--tail", "1"], ["Traceback: out of memory", "third", "fourth"]),
        (["--tail", "0"], []),
    ],
)
def test_lines_are_chosen_by_process_level_and_number(
    words: list[str], messages: list[str], data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = said(capsys, *words, "--json", "--data", str(data))

    found = [json.loads(line)["message"] for line in lines]
    assert sorted(found) == sorted(messages)


def test_the_number_of_lines_is_of_those_of_the_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, rollout_0=[record(1, "died", "error"), *(record(2, "samples") for _ in range(60))])

    assert said(capsys, "--level", "warning", "--data", str(tmp_path)) == ["00:00:01 rollout-0  error   died"]


@pytest.mark.parametrize(
    ("words", "hint"),
    [(["rolout-0"], "did you mean rollout-0"), (["zzz"], "there are gateway, rollout-0, rollout-1")],
)
def test_a_process_that_is_not_there_is_told_which_are(
    words: list[str], hint: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["logs", *words, "--data", str(data)]) == ExitCode.NOT_FOUND

    assert hint in capsys.readouterr().err


def test_a_directory_without_logs_is_told_where_runs_keep_theirs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["logs", "--data", str(tmp_path)]) == ExitCode.NOT_FOUND

    assert "runs/NAME/fleet" in capsys.readouterr().err


def test_the_end_of_a_long_file_is_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("".join(f"line {number} {'.' * 100}\n" for number in range(5000)) + "half a l")

    lines, offset = last_lines(path, 3)

    assert [line.split()[1] for line in lines] == ["4997", "4998", "4999"]
    assert offset == path.stat().st_size - len("half a l")


def test_as_many_lines_as_asked_for_are_found_however_far_back_and_much_is_not_wanted(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    texts = [f"{number} {'bad' if number % 1000 == 0 else 'good'} {'.' * 100}" for number in range(5000)]
    path.write_text("\n".join(texts) + "\nhalf bad")

    lines, offset = last_lines(path, 3, lambda text: "bad" in text)

    assert [line.split()[0] for line in lines] == ["2000", "3000", "4000"]
    assert offset == path.stat().st_size - len("half bad")
    assert len(last_lines(path, 50, lambda text: "bad" in text)[0]) == 5
    assert last_lines(path, 6000)[0] == texts
    assert last_lines(path, 0) == ([], offset)


def test_a_tail_reads_whole_lines_once_and_follows_a_file_that_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    tail = Tail(path)
    assert list(tail.more()) == []
    path.write_text("one\ntw")
    assert [line.text for line in tail.more()] == ["one"]
    path.write_text("one\ntwo\n")
    assert [line.text for line in tail.more()] == ["two"]
    path.write_text("new\n")

    assert [line.text for line in tail.more()] == ["new"]


def test_a_tail_misses_no_line_of_a_log_that_is_rotated(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("before\n")
    tail = Tail(path, len("before\n"))
    with path.open("a", buffering=1) as log:  # as a process has it open
        log.write("first\nhalf")
        assert [line.text for line in tail.more()] == ["first"]
        log.write(" a line\n")

        assert rotate(path, 10, 2)
        log.write("next\n")

        assert [line.text for line in tail.more()] == ["half a line", "next"]
    assert path.read_text() == "next\n"
    assert list(tail.more()) == []


def test_a_tail_waits_for_a_log_that_was_copied_and_is_not_emptied_yet(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("one\n")
    tail = Tail(path, len("one\n"))
    path.write_text("one\ntwo\n")
    older_log(path, 1).write_text("one\ntwo\n")

    assert list(tail.more()) == []
    path.write_text("three\n")
    assert [line.text for line in tail.more()] == ["two", "three"]


async def test_the_last_lines_reach_back_into_older_logs(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = data / "logs" / "reward-0.log"
    path.write_text("c\n")
    older_log(path, 1).write_text("a\nb\n")

    assert await logs(build_parser().parse_args(["logs", "reward", "--tail", "2", "--data", str(data)])) == 0

    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["b", "c"]


@pytest.mark.parametrize("text", ["{not json", '{"no": "record"}', "[1]", ""])
def test_what_is_no_record_is_shown_as_it_is(text: str) -> None:
    assert plain(parse("gateway", text)).endswith(text)


async def test_following_shows_what_comes_and_processes_that_join(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = build_parser().parse_args(["logs", "-f", "--tail", "1", "--data", str(data)])
    following = asyncio.create_task(logs(arguments))
    text = ""
    try:
        async with asyncio.timeout(20):
            while "fourth" not in text:
                await asyncio.sleep(0.01)
                text += capsys.readouterr().out
            write(data, rollout_2=[record(9, "joined")])
            with (data / "logs" / "gateway.log").open("a") as file:
                file.write(record(8, "went on") + "\n")
            while not ("joined" in text and "went on" in text):
                await asyncio.sleep(0.01)
                text += capsys.readouterr().out
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    assert text.count("fourth") == 1
    assert "first" not in text
