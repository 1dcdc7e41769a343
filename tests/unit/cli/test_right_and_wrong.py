"""What the log tells of evaluations to who follows a run: their series, and a right and a wrong answer."""

import asyncio
from typing import Any

import httpx
import pytest

from flotilla.cli.progress import FOLLOWED, Progress
from flotilla.cli.right_and_wrong import lines_of_answers
from flotilla.shared.errors import NotFound
from flotilla.shared.schemas.metric_names import is_known
from tests.unit.cli.gateway import client_of
from tests.unit.cli.test_progress import a_view

RIGHT = {"row": 1, "question": "6 times 7?", "prompt": "<user>6 times 7?", "completion": "42", "written": "think | 42"}
RIGHT |= {"label": "42", "reward": 1.0, "reason": None}
WRONG = {"row": 2, "prompt": "6 times 8?", "completion": "42", "label": "48", "reward": 0.0, "reason": "no"}
OTHER = "evaluation/pass@1"


class Gateway:
    """Has evaluated versions 0, 1 and so on, and notes how its log is asked."""

    def __init__(self, *answers: list[dict[str, Any]]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        self.names: list[str | None] = []
        self.is_away = False

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path, query = request.url.path, request.url.params
        if path.endswith("/log"):
            self.asked.append(request.url.query.decode())
            if self.is_away:
                return httpx.Response(404, json={"code": "not_found", "detail": "away"})
            events = [self._event(number, each) for number, each in enumerate(self.answers)]
            items = [each for each in events if each["id"] > int(query.get("after", 0))][: int(query["limit"])]
            return httpx.Response(200, json={"items": items, "next": str(items[-1]["id"]) if items else None})
        if path.endswith("/metrics"):
            self.names.append(query.get("names"))
            first = int(query.get("after", 0))
            items = [
                {"name": "evaluation/accuracy", "step": step, "version": step, "value": 0.5}
                for step in range(first, len(self.answers))
            ]
            return httpx.Response(200, json={"items": items, "next": str(len(self.answers)) if items else None})
        if path.endswith("/ledger"):
            return httpx.Response(200, json={"train": {}, "evaluation": {}})
        if path == "/v1/services":
            return httpx.Response(200, json={"items": [], "next": None})
        return httpx.Response(200, content=a_view().model_dump_json())

    def _event(self, number: int, samples: list[dict[str, Any]]) -> dict[str, Any]:
        metrics = {"evaluation/accuracy": 0.5, OTHER: number / 4}
        data = {"version": number, "step": number, "metrics": metrics, "samples": samples}
        return {"id": 10 + number, "type": "evaluation", "at": "2026-01-01T00:00:00Z", "data": data}


async def test_each_evaluation_is_read_once_with_all_its_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla.cli.progress.PAGE", 2)
    monkeypatch.setattr("flotilla.client.fleet.PAGE", 2)
    gateway, progress = Gateway([], [RIGHT, WRONG]), Progress(a_view(), FOLLOWED)
    async with client_of(gateway) as client:
        await progress.refresh(client)
        assert progress.has_unread_evaluation
        for _ in range(2):
            await progress.read_evaluations(client)
        first = progress.answers
        gateway.answers.append([])
        await progress.refresh(client)
        await progress.read_evaluations(client)

    assert first == [RIGHT, WRONG]
    assert list(progress.series[OTHER]) == [(0, 0, 0.0), (1, 1, 0.25), (2, 2, 0.5)]
    assert gateway.asked == [
        "types=evaluation&limit=2",
        "types=evaluation&after=11&limit=2",
        "types=evaluation&after=11&limit=2",
    ]
    assert not progress.has_unread_evaluation
    assert set(gateway.names) == {",".join(FOLLOWED)}


async def test_an_evaluation_that_could_not_be_read_is_read_the_next_time() -> None:
    gateway, progress = Gateway([RIGHT]), Progress(a_view(), FOLLOWED)
    async with client_of(gateway) as client:
        await progress.refresh(client)
        gateway.is_away = True
        with pytest.raises(NotFound):
            await progress.read_evaluations(client)
        assert progress.has_unread_evaluation and progress.answers == ()
        gateway.is_away = False
        await progress.read_evaluations(client)

    assert progress.answers == [RIGHT]


async def test_an_evaluation_that_ends_meanwhile_is_read_with_the_one_before() -> None:
    gateway, progress = Gateway([RIGHT]), Progress(a_view(), FOLLOWED)
    async with client_of(gateway) as client:
        await progress.refresh(client)
        gateway.answers.append([WRONG])
        async with asyncio.timeout(5):
            await progress.read_evaluations(client)

    assert not progress.has_unread_evaluation and progress.answers == [WRONG]


def test_answers_are_told_by_their_rewards() -> None:
    assert lines_of_answers([RIGHT, WRONG]) == [
        ("right", "6 times 7? -> think | 42   (reward 1, label 42)"),
        ("wrong", "6 times 8? -> 42   (reward 0, label 48)"),
    ]
    assert lines_of_answers([WRONG | {"reward": 0.5}, WRONG | {"reward": -1.0, "label": None}]) == [
        ("best", "6 times 8? -> 42   (reward 0.500, label 48)"),
        ("worst", "6 times 8? -> 42   (reward -1)"),
    ]
    assert lines_of_answers([]) == []


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_series_that_is_followed_is_one_that_runs_may_have(name: str) -> None:
    assert is_known(name)
