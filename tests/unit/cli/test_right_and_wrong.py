"""The right and the wrong answer of evaluations, as the log tells them to who follows a run."""

from typing import Any

import httpx
import pytest

from flotilla.cli.right_and_wrong import EvaluatedAnswers
from tests.unit.cli.gateway import client_of
from tests.unit.cli.test_progress import a_view

RIGHT = {"row": 1, "question": "6 times 7?", "prompt": "<user>6 times 7?", "completion": "42", "written": "think | 42"}
WRONG = {"row": 2, "prompt": "6 times 8?", "completion": "42", "label": "48", "reward": 0.0, "reason": "no"}


class Log:
    """Serves an experiment's log, and notes what it is asked for."""

    def __init__(self, *events: list[dict[str, Any]]) -> None:
        self.events = [
            {"id": 10 + number, "type": "evaluation", "at": "2026-01-01T00:00:00Z", "data": {"samples": each}}
            for number, each in enumerate(events)
        ]
        self.asked: list[str] = []
        self.is_away = False

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.query.decode())
        if self.is_away:
            return httpx.Response(404, json={"code": "not_found", "detail": "away"})
        after, limit = int(request.url.params.get("after", 0)), int(request.url.params["limit"])
        items = [each for each in self.events if each["id"] > after][:limit]
        return httpx.Response(200, json={"items": items, "next": str(items[-1]["id"]) if items else None})


async def test_the_answers_of_the_newest_evaluation_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla.cli.right_and_wrong.PAGE", 2)
    monkeypatch.setattr("flotilla.client.fleet.PAGE", 2)
    log, answers = Log([], [], [RIGHT | {"label": "42", "reward": 1.0, "reason": None}, WRONG]), EvaluatedAnswers()
    async with client_of(log) as client:
        first = await answers.newest(client, a_view())
        again = await answers.newest(client, a_view())

    assert first == [
        ("right", "6 times 7? -> think | 42   (reward 1, label 42)"),
        ("wrong", "6 times 8? -> 42   (reward 0, label 48)"),
    ]
    assert again == []
    assert log.asked == [
        "types=evaluation&limit=2",
        "types=evaluation&after=11&limit=2",
        "types=evaluation&after=12&limit=2",
    ]


async def test_of_other_rewards_one_is_the_best_and_a_gateway_that_is_away_tells_none() -> None:
    log = Log([WRONG | {"reward": 0.5}, WRONG | {"reward": -1.0, "label": None}])
    answers = EvaluatedAnswers()
    async with client_of(log) as client:
        log.is_away = True
        away = await answers.newest(client, a_view())
        log.is_away = False
        found = await answers.newest(client, a_view())

    assert away == []
    assert found == [
        ("best", "6 times 8? -> 42   (reward 0.500, label 48)"),
        ("worst", "6 times 8? -> 42   (reward -1)"),
    ]
