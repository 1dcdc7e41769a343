"""The page in a real browser, on a real fleet: what an operator does there, and what a reader cannot."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.browser import AXE, Browser, needs_browser, open_browser
from tests.fleet import RunningFleet, make_experiment, running_fleet, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580), needs_browser]

LONG_SECONDS = 120.0
MANY = 65
"""One service more than lanes are drawn for."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[RunningFleet]:
    hooks = {
        "webhooks": [{"url": "http://127.0.0.1:9/hook", "events": ["stopped"], "secret": "never-shown-to-anybody"}]
    }
    (folder / "hooks.yaml").write_text(yaml.safe_dump(hooks))
    with running_fleet(folder / "fleet", FLOTILLA_WEBHOOKS=str(folder / "hooks.yaml")) as fleet:
        yield fleet


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with open_browser(tmp_path) as browser:
        yield browser


def ask(fleet: RunningFleet, method: str, path: str, body: Any = None) -> Any:
    headers = {"Authorization": f"Bearer {fleet.token}"}
    answer = httpx.request(method, fleet.url + path, json=body, headers=headers, timeout=60)
    assert answer.is_success, answer.text
    return answer.json()


def log_in(browser: Browser, fleet: RunningFleet, token: str) -> None:
    browser.open(f"{fleet.url}/")
    browser.type("#token", token)
    browser.click("button", "Log in")
    browser.wait("h1", "Experiments")


def state_of(fleet: RunningFleet, name: str) -> str:
    return str(next(each["state"] for each in ask(fleet, "GET", "/v1/experiments")["items"] if each["name"] == name))


def shown_state(browser: Browser, name: str, state: str) -> None:
    until(
        lambda: browser.script(
            "return [...document.querySelectorAll('.experiment .name h2')].some((each) =>"
            " each.querySelector('a').textContent === arguments[0]"
            " && each.querySelector('.state').textContent === arguments[1])",
            name,
            state,
        ),
        LONG_SECONDS,
        f"{name} to be shown as {state}",
        pause_seconds=0.1,
    )


class Barriers:
    """What axe finds on the views of an operator, who has buttons and dialogs; nothing where axe is not there."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self.found: dict[str, list[str]] = {}

    def look(self, view: str) -> None:
        """Look at what is shown now, in light, and at its colours in dark."""
        if not AXE.is_file():
            return
        themes: dict[str, tuple[str, ...]] = {"light": (), "dark": ("color-contrast",)}
        for theme, rules in themes.items():
            self._browser.script("document.documentElement.dataset.theme = arguments[0]", theme)
            if barriers := self._browser.barriers(rules):
                self.found[f"{view}, {theme}"] = barriers


def test_an_operator_creates_watches_pauses_forks_compares_and_stops(
    fleet: RunningFleet, browser: Browser, folder: Path
) -> None:
    profiler = {"profiler": {"steps": [3]}}
    spec = make_experiment(folder, name="first", optimisation={"steps": 5000}, tracking=profiler)
    barriers = Barriers(browser)
    text = yaml.safe_dump(spec, sort_keys=False)

    browser.open(f"{fleet.url}/")
    browser.type("#token", "not-a-token")
    browser.click("button", "Log in")
    browser.wait("[role=alert]", "neither revoked nor expired")
    assert any("401" in each for each in browser.complaints())
    log_in(browser, fleet, fleet.token)

    # Each error stands at its line.
    browser.click("a", "New experiment")
    wrong = text.replace("learning_rate:", "learning_rte:").replace("group_size: 4", "group_size: -4")
    lines = {
        word: next(n for n, line in enumerate(wrong.splitlines(), 1) if word in line) for word in ("rte", "group_size")
    }
    browser.paste(".editor textarea", wrong)
    browser.click("button", "Create and start")
    browser.wait(".errors li", f"line {lines['rte']} optimisation.learning_rte")
    browser.wait(".errors li", f"line {lines['group_size']} rollout.group_size")
    assert browser.texts(".gutter .bad") == [str(each) for each in sorted(lines.values())]
    assert ask(fleet, "GET", "/v1/experiments")["items"] == []
    assert all("422" in each for each in browser.complaints())
    barriers.look("create")

    browser.paste(".editor textarea", text)
    browser.click("button", "Create and start")
    browser.wait("h1", "first", LONG_SECONDS)
    browser.wait("#reward .legend", "reward/mean", LONG_SECONDS)
    browser.wait("#time .legend", "computing")
    assert len(browser.texts(".chart h3")) > 10

    # What the model wrote: a list, one of it as a conversation, its tokens by version, and a link to that.
    browser.click("nav a", "Samples")
    browser.wait(".samples tbody tr", seconds=LONG_SECONDS)
    browser.choose(".toolbar select", "trained")
    browser.wait(".samples tbody td", "trained", LONG_SECONDS)
    browser.keys("jj")
    browser.wait(".trajectory .conversation .user", "pens, buys")
    browser.wait(".members .member[aria-current=true]")
    assert len(browser.texts(".members:first-of-type .member")) == 4
    browser.choose(".trajectory .toolbar select", "version")
    browser.wait(".tokens .sampled")
    assert "pens, buys" in "".join(browser.texts(".tokens"))
    coloured = browser.script(
        "return [...document.querySelectorAll('.tokens .sampled')]"
        ".map((each) => getComputedStyle(each).backgroundColor)"
    )
    assert coloured and "rgba(0, 0, 0, 0)" not in coloured
    link = browser.script("return location.hash")
    browser.script("location.hash = '#/'")
    browser.wait("h1", "Experiments")
    browser.script("location.hash = arguments[0]", link)
    browser.wait(".tokens .sampled")

    # The ledger adds up on the screen, whenever it is looked at.
    browser.click("nav a", "Flow")
    browser.wait(".stream h3", "Planned")
    for _ in range(5):
        shown = browser.script(
            "return [document.querySelector('#issued'), ...document.querySelectorAll('.sum .part')]"
            ".map((each) => Number(each.textContent.replaceAll(',', '')))"
        )
        assert shown[0] == sum(shown[1:]) > 0
        browser.wait(".sum .good", "adds up")
        until(
            lambda issued=shown[0]: browser.texts("#issued") != [f"{issued:,}"],
            LONG_SECONDS,
            "more groups to be issued",
            pause_seconds=0.1,
        )
    browser.wait(".panel h2", "What bounds the speed")
    browser.wait(".publications td", "served by 1", LONG_SECONDS)
    browser.click(".publications summary", "rollout-")
    browser.wait(".publications li", "commit")
    fills = (
        "return [...document.querySelector('.publications .lane').children].map((each) => getComputedStyle(each).fill)"
    )
    assert len(set(browser.script(fills))) == 3
    browser.wait(".queue th", "Behind")
    barriers.look("flow")

    # Its state is changed by buttons, and what is shown follows.
    browser.click("nav a", "Overview")
    shown_state(browser, "first", "running")
    browser.wait(".sparkline")
    browser.click(".actions button", "Pause")
    shown_state(browser, "first", "paused")
    assert state_of(fleet, "first") == "paused"
    barriers.look("overview")
    change_on_the_page(browser, fleet)
    browser.click(".actions button", "Resume")
    shown_state(browser, "first", "running")

    browser.click(".actions button", "Fork")
    browser.type("#fork-name", "second")
    barriers.look("dialog")
    browser.paste("#fork-changes", "optimisation.learning_rate: 2.0e-4\nresources.priority: 0")
    browser.click("dialog button", "Fork and start")
    browser.wait(".experiment h2 a", "second", LONG_SECONDS)
    forked = next(each for each in ask(fleet, "GET", "/v1/experiments")["items"] if each["name"] == "second")
    assert forked["spec"]["optimisation"]["learning_rate"] == 2.0e-4
    assert forked["origin"]["step"] >= 4

    browser.click("input[aria-label='Compare first']")
    browser.click("input[aria-label='Compare second']")
    browser.click("a", "Compare 2")
    browser.wait("h1", "first")
    browser.wait("h1", "second")

    # What came of what, who did it, and who works for it.
    browser.click("nav a", "Lineage")
    browser.wait(".tree ul a", "second")
    browser.click(".tree a", "first")
    browser.wait("h1", "first")
    browser.type("input[name=step]", "4")
    browser.click("button", "Show")
    browser.wait(".panel p", "It trained 4 groups")
    browser.click("nav a", "Log")
    browser.wait(".narrow td", "resume")
    browser.wait(".profiles button", "trainer-step00000003-rank0", LONG_SECONDS)
    barriers.look("log")
    browser.wait(".panel td", "publication committed")
    browser.choose(".panel select", "checkpoint")
    browser.wait(".panel td", "checkpoint")
    assert browser.find(".panel td", "publication committed") is None
    browser.click(".log summary", "What the services logged")
    browser.wait(".log td", "trainer-worker")
    browser.wait(".log td", "gateway")
    browser.choose(".log .toolbar label:nth-of-type(2) select", "error")
    until(lambda: browser.find(".log td", "info") is None, LONG_SECONDS, "errors alone")
    browser.click("nav a", "Fleet")
    browser.wait(".panel td", "rollout-")
    browser.wait(".panel td", "first")
    browser.wait(".graders td", "custom")
    browser.wait(".publications h2", "Publications of")
    browser.wait(".webhooks td", "http://127.0.0.1:9/***")
    barriers.look("fleet")
    browser.click(".log summary", "What the services logged")
    browser.wait(".log td", "event")

    browser.click("nav a", "Overview")
    for name in ("second", "first"):
        browser.click(f".actions [aria-label='Actions on {name}'] button", "Stop")
        browser.click("dialog button.danger", "Stop")
        shown_state(browser, name, "stopped")
    audit = ask(fleet, "GET", f"/v1/experiments/{forked['id']}/audit")["items"]
    assert audit[0]["action"] == "stop"
    assert browser.complaints() == []
    assert barriers.found == {}


def change_on_the_page(browser: Browser, fleet: RunningFleet) -> None:
    """Set a key of an experiment at work, which the record has with its value and the page with what it waits for."""
    browser.click(".actions button", "Change")
    browser.paste("#changes", "optimisation.learning_rate: 3.0e-4")
    browser.click("dialog button", "Change")
    first = until(
        lambda: next((each for each in ask(fleet, "GET", "/v1/experiments")["items"] if each["changes"]), None),
        LONG_SECONDS,
        "the change to be recorded",
        pause_seconds=0.1,
    )
    assert first["name"] == "first" and first["spec"]["optimisation"]["learning_rate"] == 3.0e-4


def test_a_reader_sees_everything_and_changes_nothing(fleet: RunningFleet, browser: Browser) -> None:
    made = ask(fleet, "POST", "/v1/tokens", {"name": "looking", "scope": "reader"})
    log_in(browser, fleet, made["token"])

    browser.wait(".experiment h2 a", "first")
    browser.wait(".sparkline")
    assert browser.find(".actions") is None
    assert set(browser.texts("button")) <= {"Auto", "Light", "Dark", "Log out"}
    assert browser.find("a", "New experiment") is None
    browser.script("location.hash = '#/new'")
    browser.wait("main", "There is no such")
    assert browser.find("textarea") is None
    browser.click("nav a", "Overview")
    browser.click(".experiment h2 a", "first")
    browser.wait("#reward .legend", "reward/mean")
    assert browser.find(".actions") is None

    # How busy very many services are is seen as a map. Their leases end soon: they register until they are seen.
    browser.click("nav a", "Fleet")

    def is_map_seen(client: httpx.Client) -> bool:
        for number in range(MANY):
            registration = {"kind": "rollout", "address": "http://127.0.0.1:9", "host": "h", "pid": 1}
            client.post("/v1/services", json=registration | {"incarnation": f"many {number}"}).raise_for_status()
            # Asked for rarely: the leases are short, and on a busy machine each look costs a part of one.
            if number % 16 == 0 and browser.find("details summary", "All ") and browser.find("canvas.heat"):
                return True
        return False

    headers = {"Authorization": f"Bearer {fleet.token}"}
    with httpx.Client(base_url=fleet.url, headers=headers, timeout=60) as client:
        until(lambda: is_map_seen(client), 200, "a map of very many services", pause_seconds=0.1)
    assert browser.find(".log") is None
    assert browser.complaints() == []

    # The token is gone with the session, and a revoked one lets nobody look any further.
    assert browser.script("return JSON.stringify(localStorage)").count(made["token"]) == 0
    assert browser.script("return document.cookie") == ""
    httpx.delete(f"{fleet.url}/v1/tokens/looking", headers={"Authorization": f"Bearer {fleet.token}"}, timeout=60)
    browser.wait("[role=alert]", "revoked or has expired")
    assert browser.find("#token") is not None
