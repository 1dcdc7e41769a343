"""The room of an image that arrives, reserved from its beginning, ahead of those who write into it."""

import asyncio
import contextlib
import threading

from shared.weights.image import WeightImage

PIECE_BYTES = 16 << 20


class Reserving:
    """Reserves an image on a thread of its own: that takes as long as receiving it, and nobody waits for both.

    Made on the event loop.
    """

    def __init__(self, image: WeightImage) -> None:
        self._image = image
        self._size = image.image_bytes
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._num_reserved = 0
        self._failure: Exception | None = None
        self._is_stopped = False
        threading.Thread(target=self._reserve, name="room for weights", daemon=True).start()

    async def reach(self, num_bytes: int) -> None:
        """Wait until the first so many bytes have room.

        Raises:
            WeightTransferFailed: there is none.
            ValueError: the image was closed.
        """
        while self._num_reserved < num_bytes:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()

    def stop(self) -> None:
        """Reserve no more."""
        self._is_stopped = True

    def _reserve(self) -> None:
        try:
            for start in range(0, self._size, PIECE_BYTES):
                if self._is_stopped:
                    raise ValueError("the image was given up")
                self._image.reserve(range(start, min(start + PIECE_BYTES, self._size)))
                self._num_reserved = min(start + PIECE_BYTES, self._size)
                self._notify()
        except Exception as error:  # whoever waits gets it
            self._failure = error
            self._notify()

    def _notify(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
            self._loop.call_soon_threadsafe(self._changed.set)
