import asyncio

import pytest
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from flotilla.shared.errors import Unavailable
from flotilla.shared.streams.redis.connection import address_of, is_absence, is_refusal, retried


async def test_an_absent_server_is_asked_again() -> None:
    answers: list[object] = [RedisConnectionError("gone"), OSError("no route"), 7]

    async def operation() -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert await retried(operation, deadline_seconds=5) == 7


async def test_after_the_deadline_it_is_unavailable_with_its_cause() -> None:
    async def operation() -> None:
        raise RedisTimeoutError("no answer")

    started = asyncio.get_running_loop().time()
    with pytest.raises(Unavailable, match=r"within 0\.06 s: no answer") as raised:
        await retried(operation, deadline_seconds=0.06)

    assert isinstance(raised.value.__cause__, RedisTimeoutError)
    assert asyncio.get_running_loop().time() - started < 10


@pytest.mark.parametrize(("error", "refuses"), [(OSError("gone"), False), (ResponseError("MISCONF disk"), True)])
async def test_a_server_that_refuses_is_told_from_one_that_is_not_there(error: Exception, refuses: bool) -> None:
    async def operation() -> None:
        raise error

    with pytest.raises(Unavailable) as raised:
        await retried(operation, deadline_seconds=0.01)

    assert is_refusal(raised.value) is refuses


async def test_a_wrong_command_is_not_repeated() -> None:
    asked = 0

    async def operation() -> None:
        nonlocal asked
        asked += 1
        raise ResponseError("ERR wrong number of arguments")

    with pytest.raises(ResponseError):
        await retried(operation, deadline_seconds=5)
    assert asked == 1


@pytest.mark.parametrize(
    ("error", "absent"),
    [
        (BusyLoadingError("LOADING"), True),
        (OutOfMemoryError("full"), True),
        (ResponseError("OOM command not allowed"), True),
        (ResponseError("Error running script (call to f_35): @user_script: 48: -OOM command not allowed when"), True),
        (ResponseError("Error running script: attempt to index a nil value"), False),
        (AuthenticationError("wrong password"), True),
        (ResponseError("WRONGTYPE"), False),
        (ResponseError("BUSYGROUP Consumer Group name already exists"), False),
        (ResponseError("BUSY Redis is busy running a script."), True),
        (ResponseError("MISCONF Errors writing to the AOF file: No space left on device"), True),
        (ResponseError("Command # 2 (XADD ...) of pipeline caused error: ('MISCONF Errors writing',)"), True),
        (ResponseError("Command # 2 (XADD {exp:BUSY}:tasks ...) of pipeline caused error: ('WRONGTYPE',)"), False),
        (ResponseError("Error running script: @user_script: 3: -READONLY You can't write against"), True),
        (ResponseError("user_script:45: MISCONF Errors writing script: 8f6, on @user_script:45."), True),
        (ReadOnlyError("You can't write against a read only replica."), True),
        (ClusterDownError("Hash slot not served"), True),
        (ResponseError("UNBLOCKED force unblock from blocking operation, instance state changed"), True),
    ],
)
def test_which_errors_pass(error: Exception, absent: bool) -> None:
    assert is_absence(error) is absent


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@localhost:6379/0", "redis://localhost:6379/0"),
        ("unix://:secret@/run/redis.sock?db=0", "unix:///run/redis.sock"),
    ],
)
def test_addresses_are_shown_without_their_password(url: str, shown: str) -> None:
    assert address_of(url) == shown
