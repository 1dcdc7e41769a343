"""The child process that SwanLab's client runs in: the library allows one run to a process, and hooks into its end.

It loads ``{run, name, folder, spec, options}``. It answers ``{records: [[step, version, values], ...]}`` once the
library has written all of them into its file, and ``{finish: true}`` once the run is marked as finished.

Source: SwanLab 0.10, ``swanlab.init``, ``Run.log``, ``Callback``.
"""

import threading
import time
from typing import Any, Final

from flotilla.shared.children.serving import serve
from flotilla.shared.errors import FlotillaError, Unavailable

HANDED_SECONDS: Final = 60.0
"""In which the library's thread takes what it was given; it looks every half a second."""
COUNTED: Final = "version"
"""The value that each record has once, by which those that were written are counted."""


class SwanlabRun:
    """A run of the library, opened again under the same id.

    Raises:
        Unavailable: the library cannot open it, as without a key or its service.
    """

    about = True

    def __init__(self, opening: Any) -> None:
        import swanlab  # an optional package, imported where it is used

        self._written = self._given = 0
        self._changed = threading.Condition()
        tracker = self

        class Written(swanlab.Callback):  # type: ignore[misc]
            """Counts records that the library has given to its file."""

            name = "flotilla"

            def on_scalar_flush(self, scalar_records: Any, *_more: Any, **_named: Any) -> None:
                tracker._count(sum(each.key == COUNTED for each in scalar_records))

        settings = swanlab.Settings(
            interactive=False,
            probe=dict.fromkeys(("hardware", "runtime", "requirements", "git", "swanlab", "monitor"), False),
            terminal={"proxy_type": "none"},
        )
        try:
            self._run = swanlab.init(
                **opening["options"],
                id=opening["run"],
                name=opening["name"],
                resume="allow",
                log_dir=opening["folder"],
                config=opening["spec"],
                settings=settings,
                callbacks=[Written()],
            )
        except Exception as error:  # whatever the library raises
            raise Unavailable(f"SwanLab cannot open the run: {type(error).__name__}: {error}") from error

    def _count(self, number: int) -> None:
        with self._changed:
            self._written += number
            self._changed.notify_all()

    def handle(self, asked: Any) -> object:
        """Write records, or finish.

        Raises:
            FlotillaError: the library did not write them in time.
        """
        if asked.get("finish"):
            self._run.finish()
            return None
        for step, version, values in asked["records"]:
            self._run.log({**values, COUNTED: version}, step=step)
            self._given += 1
        deadline = time.monotonic() + HANDED_SECONDS
        with self._changed:
            while self._written < self._given:
                if not self._changed.wait(deadline - time.monotonic()):
                    missing = self._given - self._written
                    raise FlotillaError(f"SwanLab's client did not write {missing} records in {HANDED_SECONDS:g} s")
        # Of no public name; tests/contract/gateway/test_trackers.py holds the package to it. Its file is written
        # through a buffer, which a process that is killed loses.
        self._run._ctx.core._store.ensure_flushed()
        return None


if __name__ == "__main__":
    serve(SwanlabRun)
