"""The newest lines of a process: bounded, without secrets, and each with the experiment that it belongs to."""

import json
import logging

from flotilla.shared.schemas.logs import LogEntry
from flotilla.shared.telemetry.logging import PlainLines, experiment_id
from flotilla.shared.telemetry.recent import LONGEST, KeepRecent, RecentLines


def messages(lines: RecentLines, count: int = 100, **wanted: str) -> list[str]:
    return [entry.message for entry in lines.newest(count, **wanted).items]  # type: ignore[arg-type]


def test_the_oldest_lines_go_where_there_are_too_many_or_they_are_too_long() -> None:
    few, short = RecentLines(most=3), RecentLines(characters=10)
    for number in range(5):
        few.hear(f"line {number}")
        short.hear(f"line {number}")
    long = RecentLines()
    long.hear("x" * (LONGEST + 5))

    assert messages(few) == ["line 2", "line 3", "line 4"]
    assert messages(short) == ["line 4"]
    assert len(messages(long)[0]) == LONGEST


def test_newest_lines_are_chosen_by_level_experiment_and_words() -> None:
    lines = RecentLines()
    for level, owner, message in (
        ("debug", "a", "asked"),
        ("error", "a", "It Failed"),
        ("error", "b", "another"),
        ("", "a", "Traceback"),
    ):
        lines.add(LogEntry(level=level, experiment_id=owner, message=message, process="rollout"))

    assert messages(lines, least="warning", of="a") == ["It Failed", "Traceback"]
    assert messages(lines, containing="fail") == ["It Failed"]
    assert messages(lines, 2) == ["another", "Traceback"]
    assert messages(lines, of="c") == []


def test_a_childs_record_is_read_and_any_other_line_is_of_the_experiment_at_work() -> None:
    lines = RecentLines()
    token = experiment_id.set("of-the-parent")
    try:
        record = {"at": "T", "level": "warning", "service": "trainer-worker", "logger": "x", "message": "slow"}
        lines.hear(json.dumps(record | {"experiment_id": "own", "seconds": 2}))
        lines.hear("10:11:12 ERROR    engine   cannot load seconds=3")
        lines.hear("INFO: of a library {")
    finally:
        experiment_id.reset(token)

    first, second, third = lines.newest(3).items
    assert (first.level, first.process, first.message) == ("warning", "trainer-worker", "slow")
    assert (first.facts, first.experiment_id) == ("seconds=2", "own")
    assert (second.level, second.process, second.experiment_id) == ("error", "engine", "of-the-parent")
    assert (third.level, third.message) == ("", "INFO: of a library {")


def test_a_line_of_a_process_that_several_use_is_of_the_experiment_that_it_names_and_else_of_none() -> None:
    lines = RecentLines()
    record = logging.LogRecord("x", logging.INFO, __file__, 1, "a step", (), None)
    token = experiment_id.set("one-3f9a1c")
    lines.hear(PlainLines("trainer-worker").format(record))
    experiment_id.set(None)
    record.why = "said experiment_id=other twice"
    lines.hear(PlainLines("trainer-worker").format(record))
    experiment_id.reset(token)
    lines.hear('{"message": "of no experiment"}')
    lines.hear("  File of a library, experiment_id=one-3f9a1c")

    assert [entry.experiment_id for entry in lines.newest(9).items] == ["one-3f9a1c", None, None, None]


def test_a_record_is_kept_with_its_facts_and_its_traceback() -> None:
    lines = RecentLines()
    logger = logging.getLogger("of this test alone")
    logger.propagate = False
    logger.addHandler(KeepRecent("reward", lines))
    try:
        raise RuntimeError("no room")
    except RuntimeError:
        logger.exception("it failed", extra={"url": "http://user:word@host/x", "experiment_id": "e-1"})
    finally:
        logger.handlers.clear()

    (entry,) = lines.newest(5).items
    assert (entry.level, entry.process, entry.message, entry.experiment_id) == ("error", "reward", "it failed", "e-1")
    assert "http://***@host/x" in entry.facts
    assert entry.facts.endswith("RuntimeError: no room")


def test_what_looks_like_a_secret_is_taken_out_of_message_and_facts_before_it_is_kept() -> None:
    lines = RecentLines()
    lines.add(LogEntry(message="FLOTILLA_TOKEN=SeCrEt", facts="url=http://h/?sig=SeCrEt"))

    (entry,) = lines.newest(1).items
    assert "SeCrEt" not in entry.message + entry.facts
