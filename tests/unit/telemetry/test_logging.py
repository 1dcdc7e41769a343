"""Records are JSON for programs and readable lines for a person; the environment decides, else the terminal."""

import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from flotilla.shared.environment.settings import read_settings
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.telemetry.logging import JsonLines, PlainLines, experiment_id, format_for

NEEDED = {"FLOTILLA_TOKEN": "t" * 16, "FLOTILLA_REDIS_URL": "redis://r"}


def a_record(message: str, extra: Mapping[str, Any], *, with_error: bool = False) -> logging.LogRecord:
    trace = None
    if with_error:
        try:
            raise RuntimeError("no room")
        except RuntimeError:
            trace = sys.exc_info()
    record = logging.LogRecord("flotilla.services.rollout", logging.WARNING, __file__, 1, message, (), trace)
    record.created = 86_400.0 + 3_661.5
    record.__dict__.update(extra)
    return record


def test_a_plain_line_has_time_level_service_phrase_and_facts() -> None:
    record = a_record("the start is tried again", {"pause_seconds": 0.5, "error": "took 60 s", "state": "starting"})

    line = PlainLines("rollout").format(record)

    assert line == (
        '01:01:01 WARNING  rollout  the start is tried again pause_seconds=0.5 error="took 60 s" state=starting'
    )


def test_both_formats_carry_the_context_and_neither_what_uvicorn_adds_for_itself() -> None:
    token = experiment_id.set("arithmetic-1")
    try:
        record = a_record("state changed", {"color_message": "\x1b[36m"})
        plain, parsed = PlainLines("rollout").format(record), json.loads(JsonLines("rollout").format(record))
    finally:
        experiment_id.reset(token)

    assert plain.endswith("state changed experiment_id=arithmetic-1")
    assert parsed["experiment_id"] == "arithmetic-1"
    assert "color_message" not in parsed


def test_a_traceback_follows_its_line_indented() -> None:
    head, *rest = PlainLines("rollout").format(a_record("it ended", {}, with_error=True)).splitlines()

    assert head.endswith("it ended")
    assert rest[0] == "    Traceback (most recent call last):"
    assert rest[-1] == "    RuntimeError: no room"


@pytest.mark.parametrize("hostile", ["\x1b[2J", "a\nb", "a\r"])
def test_nothing_that_a_program_wrote_can_steer_the_terminal_or_forge_a_line(hostile: str) -> None:
    line = PlainLines("sandbox").format(a_record(f"engine output {hostile}", {"line": hostile, "all": [hostile]}))

    assert line.isprintable()


@pytest.mark.parametrize(
    ("wanted", "is_terminal", "chosen"),
    [
        ("auto", True, "plain"),
        ("auto", False, "json"),
        ("json", True, "json"),
        ("plain", False, "plain"),
    ],
)
def test_a_terminal_gets_plain_lines_unless_told_otherwise(wanted: str, is_terminal: bool, chosen: str) -> None:
    assert format_for(wanted, is_terminal=is_terminal) == chosen


def test_the_environment_chooses_the_format_and_a_wrong_word_is_refused() -> None:
    assert read_settings(NEEDED).log_format == "auto"
    assert read_settings({**NEEDED, "FLOTILLA_LOG_FORMAT": ""}).log_format == "auto"
    assert read_settings({**NEEDED, "FLOTILLA_LOG_FORMAT": "plain"}).log_format == "plain"
    with pytest.raises(InvalidRequest, match="FLOTILLA_LOG_FORMAT must be auto or json or plain, got 'xml'"):
        read_settings({**NEEDED, "FLOTILLA_LOG_FORMAT": "xml"})
