"""A real Chromium, driven through ChromeDriver's own interface (W3C WebDriver): no package is needed for it."""

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from flotilla.shared.net.server.ports import lasting_port
from tests.fleet import until

PROGRAMS = ("chromium", "chromedriver")
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-color-profile=srgb",
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The key of an element's id, as the standard has it."""
SECONDS = 60.0

needs_browser = pytest.mark.skipif(
    not all(map(shutil.which, PROGRAMS)),
    reason="no Chromium with ChromeDriver here (Debian: chromium, chromium-driver)",
)


AXE = Path(__file__).parents[1] / "page" / "node_modules" / "axe-core" / "axe.min.js"
"""Deque's checker of accessibility, among the packages that the page is built with."""
needs_axe = pytest.mark.skipif(not AXE.is_file(), reason="the page's packages are not here (`make page`)")


class Browser:
    """One window.

    Args:
        client: of the driver, at its session.
    """

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        answer = self._client.request(method, path, json=body if method == "POST" else None)
        value = answer.json()["value"]
        if answer.is_error:
            raise LookupError(f"{value['error']}: {value['message'].splitlines()[0]}")
        return value

    def open(self, url: str) -> None:
        """Go to a URL."""
        self._call("POST", "url", {"url": url})

    def resize(self, width: int) -> None:
        """Make the window so wide."""
        self._call("POST", "window/rect", {"width": width, "height": 900})

    def script(self, text: str, *arguments: Any) -> Any:
        """Run the body of a function in the page; give what it returns."""
        return self._call("POST", "execute/sync", {"script": text, "args": list(arguments)})

    def before_scripts(self, text: str) -> None:
        """Run a script in every page that is opened from now on, before the page's own."""
        body = {"cmd": "Page.addScriptToEvaluateOnNewDocument", "params": {"source": text}}
        self._call("POST", "goog/cdp/execute", body)

    def find(self, selector: str, text: str = "") -> str | None:
        """Find the first visible element of a CSS selector whose text has this in it."""
        found = self.script(
            "return [...document.querySelectorAll(arguments[0])].find("
            "(each) => each.checkVisibility() && each.textContent.includes(arguments[1])) ?? null",
            selector,
            text,
        )
        return None if found is None else found[ELEMENT]

    def wait(self, selector: str, text: str = "", seconds: float = SECONDS) -> str:
        """Wait for such an element."""
        try:
            found: str = until(
                lambda: self.find(selector, text), seconds, f"{selector} with {text!r}", pause_seconds=0.1
            )
        except AssertionError as error:
            raise AssertionError(f"{error}; the page says:\n{self.text()[:2000]}") from None
        return found

    def click(self, selector: str, text: str = "") -> None:
        """Click on an element once it is there and nothing lies over it."""

        def clicked() -> bool:
            element = self.wait(selector, text)
            with suppress(LookupError):
                self._call("POST", f"element/{element}/click", {})
                return True
            return False

        until(clicked, SECONDS, f"a click on {selector} {text!r}", pause_seconds=0.1)

    def type(self, selector: str, text: str) -> None:
        """Write into a field in place of what is in it."""
        element = self.wait(selector)
        # As a person does: the driver's own way to empty a field tells the page nothing.
        self.script("arguments[0].select()", {ELEMENT: element})
        self._call("POST", f"element/{element}/value", {"text": text})

    def paste(self, selector: str, text: str) -> None:
        """Put a long text into a field at once."""
        self.wait(selector)
        self.script(
            "const field = document.querySelector(arguments[0]); field.value = arguments[1];"
            "field.dispatchEvent(new Event('input', {bubbles: true}))",
            selector,
            text,
        )

    def choose(self, selector: str, value: str) -> None:
        """Choose an entry of a list once the list has it: entries of a closed list are never visible."""

        def is_chosen() -> bool:
            chosen: bool = self.script(
                "const list = document.querySelector(arguments[0]);"
                "const offered = [...(list?.options ?? [])].map((each) => each.value);"
                "if (!list || list.disabled || !offered.includes(arguments[1])) return false;"
                "list.value = arguments[1]; list.dispatchEvent(new Event('change', {bubbles: true})); return true",
                selector,
                value,
            )
            return chosen

        until(is_chosen, SECONDS, f"the choice {value!r} in {selector}", pause_seconds=0.1)

    def keys(self, text: str) -> None:
        """Press keys, one after the other."""
        presses = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        self._call("POST", "actions", {"actions": [{"type": "key", "id": "keyboard", "actions": presses}]})

    def texts(self, selector: str) -> list[str]:
        """List the texts of all elements of a selector."""
        found: list[str] = self.script(
            "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent.trim())", selector
        )
        return found

    def text(self) -> str:
        """Give what the page shows."""
        return str(self.script("return document.body.innerText"))

    def barriers(self, rules: Sequence[str] = ()) -> list[str]:
        """List what axe finds serious or critical on what is shown: by all of its rules, or by some."""
        if not self.script("return 'axe' in window"):
            self.script(AXE.read_text(encoding="utf-8"))
        found: list[str] = self.script(
            "const options = arguments[0].length > 0 ? {runOnly: {type: 'rule', values: arguments[0]}} : {};"
            "return axe.run(document, {...options, resultTypes: ['violations']}).then(({violations}) => violations"
            ".filter((each) => ['serious', 'critical'].includes(each.impact))"
            ".flatMap((each) => each.nodes.map((node) => `${each.id}: ${node.html.slice(0, 200)}`)))",
            list(rules),
        )
        return found

    def complaints(self) -> list[str]:
        """List errors of the console since the last call: of scripts, and of what the policy refused."""
        entries = self._call("POST", "se/log", {"type": "browser"})
        return [each["message"] for each in entries if each["level"] == "SEVERE"]

    def picture(self, path: Path) -> None:
        """Save what is seen as PNG."""
        import base64

        path.write_bytes(base64.b64decode(self._call("GET", "screenshot")))


@contextmanager
def open_browser(folder: Path, *, width: int = 1280) -> Iterator[Browser]:
    """Open a window of a browser with a new profile in ``folder``."""
    port = lasting_port("127.0.0.1")
    log = folder / "chromedriver.log"
    with log.open("wb") as output:
        driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=output, stderr=output, cwd=folder)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/", timeout=60, trust_env=False) as client:

            def is_ready() -> bool:
                assert driver.poll() is None, log.read_text()
                with suppress(httpx.TransportError):
                    return bool(client.get("status").json()["value"]["ready"])
                return False

            until(is_ready, SECONDS, "ChromeDriver")
            options = {
                "binary": shutil.which("chromium"),
                "args": [*ARGUMENTS, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900"],
            }
            wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            made = client.post("session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
            assert "sessionId" in made, json.dumps(made)
            session = f"session/{made['sessionId']}"
            try:
                with httpx.Client(base_url=f"{client.base_url}{session}/", timeout=60, trust_env=False) as of_session:
                    yield Browser(of_session)
            finally:
                # The browser ends with its session, not with the driver.
                client.delete(session)
    finally:
        driver.terminate()
        try:
            driver.wait(20)
        except subprocess.TimeoutExpired:
            driver.kill()
            driver.wait()
