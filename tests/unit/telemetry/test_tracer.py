"""Spans: ids that every process computes, OTLP in JSON, and a recorder for which nobody waits."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from flotilla.shared.errors import InvalidRequest
from flotilla.shared.schemas.task import Lane
from flotilla.shared.telemetry.logging import experiment_id
from flotilla.shared.telemetry.tracing import tracer as tracing
from flotilla.shared.telemetry.tracing.recording import group_span, inner_span, trace_process, tracer, use_tracer
from flotilla.shared.telemetry.tracing.tracer import CollectorSink, FileSink, Span, Tracer, issue_of
from flotilla.shared.testing.builders import a_task


class Kept:
    """A sink in memory."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.refusals = 0
        self.is_closed = False

    def put(self, message: bytes) -> None:
        if self.refusals:
            self.refusals -= 1
            raise OSError("full")
        self.messages.append(json.loads(message))

    def close(self) -> None:
        self.is_closed = True

    def spans(self) -> list[dict[str, Any]]:
        return [
            span
            for message in self.messages
            for resource in message["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    monkeypatch.setattr(tracing, "PERIOD_SECONDS", 0.01)
    sink = Kept()
    use_tracer(Tracer("test", sink))
    token = experiment_id.set("first")
    yield sink
    experiment_id.reset(token)
    use_tracer(None)


def finish() -> None:
    made = tracer()
    assert made is not None
    made.close()


def a_span(number: int = 0, trace: str = "ab" * 16) -> Span:
    return Span("work", trace, f"{number + 1:016x}", None, 10.0, 11.5, {"a": 1, "b": True, "c": 0.5, "d": "x"})


def test_spans_within_each_other_hang_below_the_issue_of_their_group(kept: Kept) -> None:
    with group_span("rollout", a_task(7), {"x": 1}) as facts:
        facts["y"] = 2
        with inner_span("turn"):
            pass
    with inner_span("nowhere"):
        pass
    finish()

    turn, rollout = kept.spans()
    trace, issue = issue_of("first", Lane.TRAIN, 7)
    assert (rollout["name"], rollout["traceId"], rollout["parentSpanId"]) == ("rollout", trace, issue)
    assert (turn["name"], turn["traceId"], turn["parentSpanId"]) == ("turn", trace, rollout["spanId"])
    values = {each["key"]: each["value"] for each in rollout["attributes"]}
    assert values["flotilla.group"] == {"intValue": "7"} and values["y"] == {"intValue": "2"}
    assert kept.is_closed


def test_a_group_has_one_trace_in_every_process_and_each_group_its_own() -> None:
    places = [issue_of(name, lane, group) for name in ("a", "b") for lane in Lane for group in (1, 2)]

    assert len({trace for trace, _ in places}) == len({span for _, span in places}) == 8
    assert (
        issue_of("a", Lane.TRAIN, 1) == ("2b9df5f0cc0b0f5d6e3c3ef2ec8a4f1c", "0" * 16) or len(places[0].trace_id) == 32
    )
    assert all(len(trace) == 32 and len(span) == 16 for trace, span in places)


def test_a_span_that_fails_names_the_kind_of_error_and_nothing_that_a_model_wrote(kept: Kept) -> None:
    with pytest.raises(ValueError, match="invalid literal"), group_span("reward", a_task(1)):
        int("what a model wrote")
    finish()

    assert kept.spans()[0]["status"] == {"code": 2, "message": "ValueError"}


def test_nothing_is_recorded_without_a_tracer_or_an_experiment(kept: Kept) -> None:
    experiment_id.set(None)
    with group_span("rollout", a_task(1)), inner_span("turn"):
        pass
    finish()

    assert kept.messages == []


def test_a_span_is_written_as_otlp(kept: Kept) -> None:
    made = tracer()
    assert made is not None
    made.record(a_span())
    finish()

    (message,) = kept.messages
    (resource,) = message["resourceSpans"]
    assert {"key": "service.name", "value": {"stringValue": "flotilla-test"}} in resource["resource"]["attributes"]
    (span,) = resource["scopeSpans"][0]["spans"]
    assert (span["startTimeUnixNano"], span["endTimeUnixNano"]) == ("10000000000", "11500000000")
    assert [each["value"] for each in span["attributes"]] == [
        {"intValue": "1"}, {"boolValue": True}, {"doubleValue": 0.5}, {"stringValue": "x"},
    ]  # fmt: skip


def test_what_cannot_be_written_or_comes_too_fast_is_counted(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MOST_WAITING", 3)
    sink = Kept()
    sink.refusals = 1
    monkeypatch.setattr(tracing, "PERIOD_SECONDS", 60.0)
    made = Tracer("test", sink)

    for number in range(5):
        made.record(a_span(number))
    assert made.lost == 2
    made.close()

    assert made.lost == 5, "and three that the sink refused"
    made.record(a_span())
    assert made.lost == 6, "closed"


def test_no_error_of_a_sink_ends_the_recorder_and_what_was_left_out_is_told(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "PERIOD_SECONDS", 60.0)
    monkeypatch.setattr(kept, "put", lambda _: int("closed"))
    made = Tracer("test", kept)
    made.record(a_span())
    made._put_all()
    monkeypatch.undo()
    made.record(a_span(1))
    made.close()

    assert [span["spanId"] for span in kept.spans()] == [f"{2:016x}"]
    assert kept.is_closed
    assert made.lost == 1
    assert [(each.message, each.__dict__["spans"]) for each in caplog.records[1:]] == [("spans were left out", 1)]


def test_a_share_is_the_same_groups_everywhere() -> None:
    tracers = [Tracer(name, Kept(), share=0.25) for name in ("one", "other")]
    traces = [issue_of("first", Lane.TRAIN, group).trace_id for group in range(2000)]

    taken = [[trace for trace in traces if made.takes(trace)] for made in tracers]
    for made in tracers:
        made.close()

    assert taken[0] == taken[1]
    assert 0.2 < len(taken[0]) / len(traces) < 0.3


def test_a_file_of_spans_is_bounded(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "traces", "test", most_bytes=100)
    for number in range(10):
        sink.put(b"%040d" % number)
    sink.close()

    files = sorted((tmp_path / "traces").iterdir())
    assert [each.suffix for each in files] == [".jsonl", ".1"]
    lines = [int(line) for each in reversed(files) for line in each.read_text().split()]
    assert lines == [6, 7, 8, 9]


def test_a_file_of_spans_goes_on_where_it_could_not_be_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = FileSink(tmp_path, "test", most_bytes=100)
    sink.put(b"%080d" % 1)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", lambda *_: Path("/proc/nowhere/file").touch())
        with pytest.raises(OSError):
            sink.put(b"%080d" % 2)
    sink.put(b"%080d" % 3)
    sink.close()

    assert sorted(int(each.read_text()) for each in tmp_path.iterdir()) == [1, 3]


def test_containers_that_share_a_folder_write_to_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = set()
    for host in ("one", "other"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        sink = FileSink(tmp_path, "rollout")
        paths.add(sink.path)
        sink.close()

    assert len(paths) == 2


def test_an_error_of_a_collector_does_not_tell_its_password() -> None:
    sink = CollectorSink("http://me:secret@127.0.0.1:1")
    sink._client = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(401)))

    with pytest.raises(OSError, match="401") as raised:
        sink.put(b"{}")
    assert "secret" not in repr(raised.value)


def test_a_collector_is_sent_json_and_what_it_refuses_is_left_out() -> None:
    found: list[tuple[str, str | None, Any]] = []
    statuses = iter([200, 503])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.append((self.path, self.headers["Content-Type"], json.loads(body)))
            self.send_response(next(statuses))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        sink = CollectorSink(f"http://127.0.0.1:{server.server_port}/")
        made = Tracer("test", sink)
        made.record(a_span())
        made._put_all()
        made.record(a_span())
        made._put_all()
        made.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

    assert [(path, kind) for path, kind, _ in found] == [("/v1/traces", "application/json")] * 2
    assert found[0][2]["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["name"] == "work"
    assert made.lost == 1


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"FLOTILLA_TRACES": "traces"}, "FLOTILLA_TRACES must be"),
        ({"FLOTILLA_TRACES": "http://"}, "FLOTILLA_TRACES must be"),
        ({"FLOTILLA_TRACES": "http://collector:otlp"}, "FLOTILLA_TRACES must be"),
        ({"FLOTILLA_TRACES": "http://[::1"}, "FLOTILLA_TRACES must be"),
        ({"FLOTILLA_TRACES": "/proc/nowhere"}, "no spans can be written"),
        ({"FLOTILLA_TRACES": "/tmp", "FLOTILLA_TRACES_SHARE": "0"}, "FLOTILLA_TRACES_SHARE must be"),
        ({"FLOTILLA_TRACES": "/tmp", "FLOTILLA_TRACES_SHARE": "much"}, "FLOTILLA_TRACES_SHARE must be"),
    ],
)
def test_a_wrong_setting_is_said_at_the_start(variables: dict[str, str], named: str, tmp_path: Path) -> None:
    changed = {name: value.replace("/tmp", str(tmp_path)) for name, value in variables.items()}
    with pytest.raises(InvalidRequest, match=named):
        trace_process("test", changed)

    assert tracer() is None
