"""Answers of graders that come later than they were asked.

A grader posts it with the token of its address, which only it knows, and signs it where the component has a
secret. What it says is read where it is graded by.
"""

from typing import Annotated, Final

from fastapi import APIRouter, Path, Query, Request

from flotilla.services.gateway.routes.dependencies import Gateway
from flotilla.shared.errors import Conflict, FlotillaError, NotFound, Unauthorized
from flotilla.shared.net.authorisation.tokens import is_same_secret, signature
from flotilla.shared.schemas.grading import TakenGrading
from flotilla.shared.streams.mailbox import Delivery

router = APIRouter(prefix="/gradings", tags=["gradings"])

OLDEST_SECONDS: Final = 300.0
SIGNATURE: Final = "x-flotilla-signature"
TIMESTAMP: Final = "x-flotilla-timestamp"


class GradingOver(FlotillaError):
    """The answer came after its deadline."""

    code, title, status = "grading_over", "The answer came too late", 410


@router.post("/{grading_id}")
async def answer(
    grading_id: Annotated[str, Path(pattern=r"^[0-9a-f]{32}$")],
    gateway: Gateway,
    request: Request,
    experiment: Annotated[str, Query(max_length=200)] = "",
    token: Annotated[str, Query(max_length=200)] = "",
) -> TakenGrading:
    """Take a grader's answer: a ``GradingResponse``; the same one again is taken again.

    Raises:
        Unauthorized: the address was not given out, or the signature is not right, or old.
        Conflict: another answer was taken before.
        GradingOver: it came too late.
        BodyTooLarge: it is longer than 1 MiB.
    """
    found = gateway.repository.find(experiment)
    expected = None if found is None else await found.train.mailbox.find(grading_id)
    url_token, _, key = (":" if expected is None else expected.key).partition(":")
    if found is None or expected is None or not url_token or not is_same_secret(token, url_token):
        # An unexpected answer is not distinguished from an unauthorised one.
        raise Unauthorized("post to the callback_url of the request, unchanged; it is kept for an hour after its end")
    # Only now: a caller without a valid address makes the gateway hold nothing.
    body = await request.body()
    if key:
        _check_signature(request, key, body, gateway.clock.now())
    match await found.train.mailbox.deliver(grading_id, body):
        case Delivery.TAKEN:
            return TakenGrading(id=grading_id, is_first=True)
        case Delivery.AGAIN:
            return TakenGrading(id=grading_id, is_first=False)
        case Delivery.OTHER:
            raise Conflict("another answer to this request was taken before")
        case Delivery.LATE:
            raise GradingOver("the answer came after the deadline of its request")
        case Delivery.UNKNOWN:
            raise NotFound("nobody expects this answer any more")


def _check_signature(request: Request, key: str, body: bytes, now: float) -> None:
    timestamp = request.headers.get(TIMESTAMP, "")
    is_recent = timestamp.isdigit() and len(timestamp) < 16 and abs(now - int(timestamp)) <= OLDEST_SECONDS
    if not is_recent or not is_same_secret(request.headers.get(SIGNATURE), f"sha256={signature(key, timestamp, body)}"):
        raise Unauthorized(
            "sign the callback: HMAC-SHA-256 over timestamp, full stop and body, keyed with the hexadecimal "
            "HMAC-SHA-256 of the request's id under the secret; the timestamp is at most five minutes old"
        )
