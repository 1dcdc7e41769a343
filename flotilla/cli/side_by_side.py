"""Work that goes on while something else begins: both are waited for, and neither outlives the other's failure."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine


@contextlib.asynccontextmanager
async def beside(work: Coroutine[None, None, None]) -> AsyncGenerator[None, None]:
    """Do ``work`` while the body goes on, and leave when both are done.

    The first failure of either cancels the other, which is waited for, and is what is raised. Cancelling ends both.
    """
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(work)
            yield
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
