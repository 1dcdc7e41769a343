"""What the model wrote: samples of an experiment, filtered and paged."""

import sqlite3
from typing import Annotated

from fastapi import APIRouter, Query, Request

from flotilla.services.gateway.routes.dependencies import MAX_WHOLE, Cursor, Gateway
from flotilla.shared.config.sections.model import ModelConfig
from flotilla.shared.errors import InvalidRequest, ModelError, Unavailable
from flotilla.shared.models.hub import model_directory
from flotilla.shared.models.token_texts import TokenTexts, token_texts
from flotilla.shared.samples.query import SampleOrder, SampleQuery
from flotilla.shared.samples.reading import read_page
from flotilla.shared.schemas.sample_kinds import SampleKind
from flotilla.shared.schemas.samples import SamplePage
from flotilla.shared.schemas.trajectory import GradeStatus

router = APIRouter(prefix="/experiments/{experiment_id}", tags=["samples"])

LARGEST_PAGE = 200
READ_SECONDS = 0.3
Reward = Annotated[float | None, Query(allow_inf_nan=False)]


@router.get("/samples")
async def samples(
    experiment_id: str,
    gateway: Gateway,
    request: Request,
    step: Annotated[int | None, Query(ge=0, le=MAX_WHOLE, description="of this step, or evaluated after it")] = None,
    kind: Annotated[str | None, Query(description="trained, filtered, dropped, failed, evaluation; by commas")] = None,
    row: Annotated[int | None, Query(ge=0, le=MAX_WHOLE, description="of the dataset: the problem")] = None,
    group: Annotated[int | None, Query(ge=0, le=MAX_WHOLE, description="id of a group")] = None,
    status: Annotated[GradeStatus | None, Query(description="how grading ended")] = None,
    failed: Annotated[bool, Query(description="of failed groups, or whose grading failed")] = False,
    min_reward: Reward = None,
    max_reward: Reward = None,
    order: SampleOrder = SampleOrder.NEWEST,
    tokens: Annotated[bool, Query(description="with token ids, log-probabilities, advantages")] = False,
    after: Cursor = None,
    limit: Annotated[int, Query(ge=1, le=LARGEST_PAGE)] = 20,
) -> SamplePage:
    """List samples. ``num_unread`` files are not looked at yet: those of the newest steps always are.

    Raises:
        NotFound: there is no such experiment.
        InvalidRequest: a kind that is none, or a cursor of another list.
        TooManyRequests: the token has as many of these open as it may.
    """
    experiment = gateway.repository.get(experiment_id)
    query = SampleQuery(
        step=step,
        kinds=_kinds(kind),
        row=row,
        group=group,
        status=status,
        is_failure=failed,
        min_reward=min_reward,
        max_reward=max_reward,
        order=order,
    )
    index = gateway.samples.of(experiment)

    def read() -> SamplePage:
        found = read_page(index, query, limit=limit, after=after, with_tokens=tokens, seconds=READ_SECONDS)
        page = found.plain()
        if tokens and (texts := _texts_of(experiment.spec.model)) is not None:
            for item in page["items"]:
                item["tokens"] = {**item["tokens"], "texts": texts.of(item["tokens"]["token_ids"])}
        return SamplePage.model_validate(page)

    try:
        return await gateway.samples.reads.read(request.state.shown.principal.actor, read)
    except (OSError, sqlite3.Error) as error:
        raise Unavailable(f"the samples of {experiment_id} cannot be read: {error}") from error


def _texts_of(model: ModelConfig) -> TokenTexts | None:
    """Read the vocabulary where preflight has put the files of a hub's model; overrides do not change it."""
    try:
        return token_texts(model_directory(model.model_copy(update={"overrides": {}})))
    except ModelError:
        return None


def _kinds(text: str | None) -> tuple[SampleKind, ...]:
    try:
        return tuple(SampleKind(name) for name in (text or "").split(",") if name)
    except ValueError as error:
        raise InvalidRequest(f"kind: {error}; allowed: {', '.join(SampleKind)}") from None
