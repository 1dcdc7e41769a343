"""Every rank shows that it lives, and watches the others: one that is silent for too long ends the job, named.

Collectives have deadlines of their own, but long ones, and who waits for a command is in none. A rank whose process
ended is found by ``torch.distributed.run`` within moments; this is for one that is stopped, or whose machine is.
"""

import threading
import time
from collections.abc import Callable

from torch.distributed import Store  # type: ignore[attr-defined]

BEAT_SECONDS = 2.0
SILENT_SECONDS = 40.0


class Pulse:
    """Beats on a thread of its own until closed.

    Args:
        store: a connection that nobody else uses.
        rank, size: of this process, and of the job.
        on_silence: called once on that thread, with a sentence that names the rank.
    """

    def __init__(self, store: Store, rank: int, size: int, on_silence: Callable[[str], None]) -> None:
        self._store, self._rank, self._size, self._on_silence = store, rank, size, on_silence
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop beating."""
        self._closed.set()
        self._thread.join(timeout=BEAT_SECONDS)

    def _beat(self) -> None:
        seen: dict[int, tuple[int, float]] = {}
        try:
            while not self._closed.wait(BEAT_SECONDS):
                self._store.add(_key(self._rank), 1)
                now = time.monotonic()
                for other in range(self._size):
                    beats = self._store.add(_key(other), 0)
                    before = seen.setdefault(other, (beats, now))
                    if beats != before[0]:
                        seen[other] = beats, now
                    elif now - before[1] > SILENT_SECONDS:
                        self._on_silence(f"rank {other} of {self._size} was silent for {SILENT_SECONDS:g} s")
                        return
        except RuntimeError as error:
            if not self._closed.is_set():
                self._on_silence(f"the store of the training job is gone: {error}")


def _key(rank: int) -> str:
    return f"beats/{rank}"
