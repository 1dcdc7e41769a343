"""``flotilla page RUN...``: run folders in a browser, without a fleet, and with nothing that could be changed."""

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from flotilla.cli.demo.unpacking import ARCHIVE
from flotilla.services.gateway.store.records import AuditRecord
from flotilla.services.gateway.store.sql import SqlStore
from flotilla.services.gateway.store.writes import (
    AppendAudit,
    AppendEvent,
    PointRecord,
    PutCheckpoint,
    PutMetrics,
    PutRecord,
)
from flotilla.shared.schemas.experiment import CheckpointView, ExperimentState
from tests.browser import needs_axe, needs_browser, open_browser
from tests.fleet import FLOTILLA, ROOT, until
from tests.unit.gateway.builders import a_record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

AT = "2026-01-02T03:04:05.000Z"
AFTER = datetime.fromisoformat(AT).timestamp() + 10
LANE = {
    "issued": 7,
    "waiting": {"tasks": 0, "generated": 0, "scored": 0},
    "claimed": {"tasks": 0, "generated": 0, "scored": 0},
    "planned": 0,
    "trained": 4,
    "filtered": {"zero_spread": 2},
    "dropped": {"stale": 1},
    "failed": {},
    "outstanding": 0,
    "consumed_since_publication": 0,
    "tokens": {"generated": 70, "scored": 70, "trained": 40},
    "lengths": {},
    "balanced": True,
}


async def keep_run(run: Path, name: str, rewards: list[float]) -> None:
    """Write what a gateway leaves of an experiment that has ended."""
    data = run / "fleet"
    data.mkdir(parents=True)
    record = a_record(name, name=name, state=ExperimentState.COMPLETED, step=len(rewards))
    store = await SqlStore.open(f"sqlite:///{data / 'gateway.sqlite'}")
    points = [
        PointRecord(name="reward/mean", step=step, version=step, value=value, at=AT)
        for step, value in enumerate(rewards, start=1)
    ]
    await store.apply(
        [
            PutRecord(replace(record, final_ledger={"train": LANE, "evaluation": LANE})),
            PutMetrics(name, points),
            AppendEvent(name, "training_finished", 1.0, {"step": len(rewards)}),
            AppendEvent(name, "service_failed", AFTER, {"service_id": "reward-1", "cause": "it was killed"}),
            AppendAudit(AuditRecord(1.0, "start", f"experiments/{name}", {}, "somebody")),
            PutCheckpoint(name, CheckpointView(step=2, version=2, path="/nowhere/step-2", at=AT)),
        ]
    )
    await store.close()


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder, rewards in zip(folders, ([0.1, 0.2, 0.4], [0.3, 0.5, 0.9]), strict=True):
        anyio.run(keep_run, folder, folder.name, rewards)
    return folders


@contextmanager
def page_of(*folders: Path | str) -> Iterator[tuple[str, str]]:
    """Run the command while the block lasts; gives the page's address and its token."""
    command = [*FLOTILLA, "page", *map(str, folders), "--no-browser", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"(http://\S+)/#token=(\S+)", process.stdout.readline())
            assert found is not None
            yield found[1], found[2]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0


def test_several_run_folders_answer_as_a_gateway_would_and_refuse_every_change(runs: list[Path]) -> None:
    with (
        page_of(*runs) as (url, token),
        httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}) as client,
    ):

        def get(path: str) -> Any:
            answer = client.get(path)
            assert answer.status_code == 200, answer.text
            return answer.json()

        of_first = "/v1/experiments/first"
        assert [each["id"] for each in get("/v1/experiments?spec=false")["items"]] == ["first", "second"]
        assert get("/v1/tokens/self")["scope"] == "reader"
        assert get(f"{of_first}/series?names=reward/mean")["items"][0]["values"] == [0.1, 0.2, 0.4]
        assert [each["type"] for each in get(f"{of_first}/log")["items"]] == ["training_finished", "service_failed"]
        chosen = get(f"{of_first}/log?types=stalled,service_failed")
        assert [each["type"] for each in chosen["items"]] == ["service_failed"]
        assert get(f"{of_first}/log?types=stalled&after={chosen['next']}") == {"items": [], "next": None}
        assert client.get(f"{of_first}/log?types=Stalled!").status_code == 422
        assert [each["actor"] for each in get(f"{of_first}/audit")["items"]] == ["somebody"]
        assert [each["step"] for each in get(f"{of_first}/checkpoints")["items"]] == [2]
        assert get(f"{of_first}/ledger")["train"]["issued"] == 7
        assert get(f"{of_first}/diagnosis")["component"] == "none"
        for method, path in (("POST", f"{of_first}/resume"), ("DELETE", of_first), ("POST", "/v1/experiments")):
            assert client.request(method, path).status_code == 403


def test_a_folder_without_a_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    result = subprocess.run(
        [*FLOTILLA, "page", str(tmp_path), "--no-browser"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )

    assert result.returncode != 0
    assert "there are no experiments in" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_recorded_run_has_series_samples_and_texts_of_their_tokens_and_is_small() -> None:
    assert ARCHIVE.stat().st_size < 1_000_000
    with (
        page_of("--demo") as (url, token),
        httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=60) as client,
    ):
        (experiment,) = client.get("/v1/experiments").json()["items"]
        path = f"/v1/experiments/{experiment['id']}"
        (reward,) = client.get(f"{path}/series?names=reward/mean").json()["items"]
        samples: dict[str, Any] = {}
        until(
            lambda: (
                samples.update(client.get(f"{path}/samples?step=60&tokens=true&limit=2").json()) or samples["items"]
            ),
            30,
            "the samples to be indexed",
        )

    assert (experiment["name"], experiment["state"], experiment["step"]) == ("arithmetic", "completed", 60)
    assert len(reward["values"]) == 60 and reward["values"][-1] > reward["values"][0] + 0.2
    sample = samples["items"][0]
    assert sample["prompt"] + sample["completion"] in "".join(sample["tokens"]["texts"])


@needs_browser
def test_a_browser_shows_run_folders_over_each_other(runs: list[Path], tmp_path: Path) -> None:
    with page_of(*runs) as (url, token), open_browser(tmp_path) as browser:
        browser.open(f"{url}/#token={token}")
        browser.wait(".experiment h2 a", "second")
        assert token not in browser.script("return location.href")
        assert browser.find(".actions") is None
        browser.click("input[aria-label='Compare first']")
        browser.click("input[aria-label='Compare second']")
        browser.click("a", "Compare 2")
        browser.wait("#reward .legend li", "first 0.4")
        browser.wait("#reward .legend li", "second 0.9")
        browser.wait(".toolbar label", "marks (2)")
        browser.click(".toolbar label", "marks")
        until(lambda: browser.find(".toolbar label", "marks (") is None, 20, "no marks")
        assert "marks=0" in browser.script("return location.hash")
        browser.click("nav a", "Flow")
        browser.wait(".sum .good", "adds up")
        assert browser.complaints() == []


@needs_browser
def test_answers_to_a_token_that_expired_do_not_end_the_login_behind_it(runs: list[Path], tmp_path: Path) -> None:
    with page_of(*runs) as (url, token), open_browser(tmp_path) as browser:
        browser.open(f"{url}/")
        browser.wait("#token")
        browser.script("sessionStorage.setItem('flotilla-token', 'expired'); location.reload()")
        browser.wait("#token")
        until(
            lambda: browser.script("return sessionStorage.getItem('flotilla-token')") is None, 20, "the old one's end"
        )

        browser.type("#token", token)
        browser.click("button", "Log in")

        browser.wait(".experiment h2 a", "second")
        assert browser.script("return sessionStorage.getItem('flotilla-token')") == token


WIDTH, PHONE_WIDTH = 1280, 500
"""Chromium makes no narrower window."""
VIEWS = {
    "run": ".chart .uplot canvas",
    "samples": ".samples tbody tr",
    "flow": ".sum .good",
    "lineage": ".evaluations td",
    "log": ".panel td",
    "fleet": ".panel h2",
}
"""What each shows once it has loaded."""


@needs_browser
@needs_axe
def test_no_view_has_a_serious_barrier_in_light_or_dark(tmp_path: Path) -> None:
    with page_of("--demo") as (url, token), open_browser(tmp_path) as browser:

        def found() -> list[str]:
            # What the colours are is all that differs between the themes.
            rules: dict[str, tuple[str, ...]] = {"light": (), "dark": ("color-contrast",)}
            barriers = []
            for theme, chosen in rules.items():
                browser.script("document.documentElement.dataset.theme = arguments[0]", theme)
                barriers += [f"{theme}: {each}" for each in browser.barriers(chosen)]
            return barriers

        def found_on_a_phone() -> list[str]:
            # What the window's width changes is what fits into it.
            browser.resize(PHONE_WIDTH)
            rule = "scrollable-region-focusable"
            try:
                until(lambda: not browser.barriers([rule]), 10, "the keyboard to reach what scrolls")
                return []
            except AssertionError:
                return browser.barriers([rule])
            finally:
                browser.resize(WIDTH)

        browser.open(f"{url}/")
        browser.wait("#token")
        barriers = {"login": found()}
        browser.open("about:blank")
        browser.open(f"{url}/#token={token}")
        browser.wait(".sparkline")
        barriers["overview"] = found()
        link = browser.script("return document.querySelector('.experiment h2 a').hash")
        for view, shown in VIEWS.items():
            browser.script("location.hash = arguments[0]", link.replace("run", view, 1))
            browser.wait(shown)
            if view == "samples":
                browser.keys("jj")
                browser.wait(".samples tbody tr:nth-child(2)[aria-selected=true]")
                browser.choose(".trajectory .toolbar select", "version")
                browser.wait(".tokens .sampled")
            barriers[view] = found() + found_on_a_phone()

        assert {view: each for view, each in barriers.items() if each} == {}
        # It does look: grey on grey and a field without a name are found.
        browser.script(
            "const grey = document.createElement('p'); grey.textContent = 'grey';"
            "Object.assign(grey.style, {color: '#999', background: '#aaa'});"
            "document.querySelector('main').replaceChildren(grey, document.createElement('input'))"
        )
        assert {each.split(": ")[1] for each in found()} >= {"color-contrast", "label"}
