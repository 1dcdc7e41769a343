"""Problem documents are bounded, whatever the mistake quotes."""

import json

from flotilla.shared.errors import InvalidRequest
from flotilla.shared.net.server.serving import MAX_DETAIL, MAX_ERRORS, MAX_TEXT, problem_response


def test_a_problem_lists_so_many_errors_and_says_how_many_more_there_are() -> None:
    errors = [{"path": f"key{number}", "allowed": "nothing"} for number in range(600)]

    body = json.loads(bytes(problem_response(InvalidRequest("x", errors=errors)).body))

    assert body["errors"] == errors[:MAX_ERRORS]
    assert body["num_more_errors"] == 600 - MAX_ERRORS


def test_a_problem_quotes_the_beginning_of_a_long_text() -> None:
    name = "n" * 1_000_000
    error = InvalidRequest(f"no model {name}", errors=[{"path": name, "value": name, "allowed": "another"}], given=name)

    answer = bytes(problem_response(error).body)
    body = json.loads(answer)

    assert len(answer) < MAX_DETAIL + 4 * MAX_TEXT
    assert body["detail"].startswith("no model nnn") and body["detail"].endswith("more characters)")
    assert body["errors"][0]["path"].startswith("n" * MAX_TEXT)


def test_a_short_problem_is_as_it_was() -> None:
    errors = [{"path": "a", "value": 1, "allowed": "2"}]

    body = json.loads(bytes(problem_response(InvalidRequest("a: 2", errors=errors, step=3)).body))

    assert (body["detail"], body["errors"], body["step"]) == ("a: 2", errors, 3)
    assert "num_more_errors" not in body
