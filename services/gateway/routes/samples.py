"""What the model wrote: samples of an experiment, filtered and paged."""

import sqlite3
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from flotilla.services.gateway.routes.dependencies import MAX_WHOLE, Gateway
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
Whole = Annotated[int | None, Field(ge=0, le=MAX_WHOLE)]
Reward = Annotated[float | None, Field(allow_inf_nan=False)]


class SampleListing(BaseModel):
    """What a request asks for: which samples, with what, and which page of them."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    step: Whole = Field(None, description="of this step, or evaluated after it")
    kind: str | None = Field(None, description="trained, filtered, dropped, failed, evaluation; by commas")
    row: Whole = Field(None, description="of the dataset: the problem")
    group: Whole = Field(None, description="id of a group")
    status: GradeStatus | None = Field(None, description="how grading ended")
    failed: bool = Field(False, description="of failed groups, or whose grading failed")
    min_reward: Reward = None
    max_reward: Reward = None
    order: SampleOrder = SampleOrder.NEWEST
    tokens: bool = Field(False, description="with token ids, log-probabilities, advantages")
    after: str | None = Field(None, description="`next` of the page before")
    limit: int = Field(20, ge=1, le=LARGEST_PAGE)

    def query(self) -> SampleQuery:
        """Return which samples are wanted.

        Raises:
            InvalidRequest: a kind that is none.
        """
        return SampleQuery(
            step=self.step,
            kinds=_kinds(self.kind),
            row=self.row,
            group=self.group,
            status=self.status,
            is_failure=self.failed,
            min_reward=self.min_reward,
            max_reward=self.max_reward,
            order=self.order,
        )


@router.get("/samples")
async def samples(
    experiment_id: str, gateway: Gateway, request: Request, listing: Annotated[SampleListing, Query()]
) -> SamplePage:
    """List samples. ``num_unread`` files are not looked at yet: those of the newest steps always are.

    Raises:
        NotFound: there is no such experiment.
        InvalidRequest: a kind that is none, or a cursor of another list.
        TooManyRequests: the token has as many of these open as it may.
    """
    experiment = gateway.repository.get(experiment_id)
    query, tokens = listing.query(), listing.tokens
    index = gateway.samples.of(experiment)

    def read() -> SamplePage:
        found = read_page(
            index, query, limit=listing.limit, after=listing.after, with_tokens=tokens, seconds=READ_SECONDS
        )
        page = found.plain()
        if tokens and (texts := _texts_of(experiment.spec.model)) is not None:
            for item in page["items"]:
                item["tokens"] = {**item["tokens"], "texts": texts.of(item["tokens"]["token_ids"])}
        return SamplePage.model_validate(page)

    try:
        page = await gateway.samples.reads.read(request.state.shown.principal.actor, read)
    except (OSError, sqlite3.Error) as error:
        raise Unavailable(f"the samples of {experiment_id} cannot be read: {error}") from error
    if page.num_unread:
        gateway.samples.read_on(experiment)
    return page


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
