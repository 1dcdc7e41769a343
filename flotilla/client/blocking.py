"""What all calls without ``await`` share: an asynchronous client on a thread of its own."""

import copy
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import ClassVar, ParamSpec, Self, TypeVar

from flotilla.client.calls import CALL_SECONDS, Calls
from flotilla.client.loop_thread import LoopThread
from flotilla.connection import DEFAULT_DATA

Result = TypeVar("Result")
Params = ParamSpec("Params")


class BlockingCalls:
    """Calls one gateway without ``await``; arguments and errors are those of :class:`Calls`."""

    client_class: ClassVar[type[Calls]] = Calls

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        data: str | Path = DEFAULT_DATA,
        deadline_seconds: float = CALL_SECONDS,
    ) -> None:
        async def connected() -> Calls:
            return self.client_class(url, token, data=data, deadline_seconds=deadline_seconds)

        self._thread = LoopThread()
        try:
            self._client = self._thread.call(connected)
        except BaseException:
            self._thread.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread; a second time nothing is left to do."""
        if self._thread.is_closed:
            return
        try:
            self._thread.call(self._client.close)
        finally:
            self._thread.close()

    @property
    def base_url(self) -> str:
        """The gateway's URL."""
        return self._client.base_url

    def with_deadline(self, seconds: float) -> Self:
        """Return the same client with another deadline for each call; both share their connections and thread."""
        other = copy.copy(self)
        other._client = self._client.with_deadline(seconds)
        return other

    def _each(self, following: AsyncGenerator[Result, None]) -> Iterator[Result]:
        async def next_one() -> tuple[Result] | None:
            async for found in following:
                return (found,)
            return None

        try:
            while (found := self._run(next_one)) is not None:
                yield found[0]
        finally:
            self._run(following.aclose)

    def _run(
        self, method: Callable[Params, Awaitable[Result]], *arguments: Params.args, **options: Params.kwargs
    ) -> Result:
        async def call() -> Result:
            return await method(*arguments, **options)

        return self._thread.call(call)
