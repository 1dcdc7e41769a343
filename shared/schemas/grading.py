"""What is graded and what a grade is: the wire schema between the fleet and any grader, built-in or external.

A grade is ``scored`` with a finite reward, ``abstained`` (the grader has no opinion) or ``error`` (it could not tell).
Neither of the last two ever has a reward: a failed grade is not a zero.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, FiniteFloat, JsonValue, TypeAdapter, model_validator

from flotilla.shared.schemas.reward_number import Reward
from flotilla.shared.schemas.trajectory import GradeStatus
from flotilla.shared.schemas.wire import TolerantWire, assembled

GRADING_SCHEMA: Final = 1
"""Version of the request and of the answer; it changes only when a reader of the old form would misread the new one."""


def encodable(text: str) -> str:
    """Replace lone surrogates, which JSON can spell and UTF-8 cannot: no text may make a request impossible."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


Text = Annotated[str, AfterValidator(encodable)]
MAX_REASON_CHARACTERS: Final = 2000
Reason = Annotated[Text, AfterValidator(lambda text: text[:MAX_REASON_CHARACTERS])]
"""For people; of a longer one the beginning is kept."""


Numbers = dict[Text, FiniteFloat]
MEASURED: Final = TypeAdapter(Numbers)
"""Checks what was measured of a sample."""


class GradingMessage(TolerantWire):
    """One message of the chat prompt."""

    role: str
    content: Text


class GradingTurn(TolerantWire):
    """One turn of an episode."""

    observation: Text
    """What the policy was shown since its last turn: an observation, tool results; empty in the first turn."""
    response: Text
    """What the policy sampled, decoded."""
    reward: FiniteFloat | None = None
    """What the environment gave for it; null where nothing did."""


class GradingSample(TolerantWire):
    """One answer to be graded, with all that a grader may need to know about it."""

    id: str
    """Names the sample within its experiment, the same at every attempt: ``{group_id}/{index}`` for a trajectory."""
    prompt: Text
    """The prompt as text, as the model saw it."""
    messages: tuple[GradingMessage, ...] = ()
    """The chat prompt that ``prompt`` was rendered from; empty if the task was not a chat."""
    response: Text
    """What the policy sampled, decoded; of several turns the last."""
    label: Text | None = None
    """What to compare with, if the dataset has it."""
    data_source: str | None = None
    """Name of the dataset the task came from, if it has one."""
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    """Further columns of the dataset's row, unchanged."""
    turns: tuple[GradingTurn, ...] = ()
    """The turns of an episode; empty where there is one prompt and one completion."""
    finish_reason: str | None = None
    """Why the answer or the episode ended: stop, length, turns, tokens. Null: the sender does not say."""
    measured: Numbers = Field(default_factory=dict)
    """What the environment measured, such as ``environment/success``."""
    episode: str | None = None
    """Id of the episode, where an agent from outside drove it; several samples may be branches of one."""


class Grade(TolerantWire):
    """How grading of one sample ended."""

    status: Literal[GradeStatus.SCORED, GradeStatus.ABSTAINED, GradeStatus.ERROR]
    """scored, abstained or error. A sender may leave it out: it is then scored if there is a reward, else abstained."""
    reward: Reward | None = None
    """The scalar to train on, a finite number; present exactly if ``status`` is scored."""
    components: Numbers = Field(default_factory=dict)
    """What the reward was made of, by name."""
    metrics: Numbers = Field(default_factory=dict)
    """Free numbers for charts; they do not enter the reward."""
    reason: Reason | None = None
    """Why there is no reward; required of an error."""
    answer: Text | None = None
    """The answer extracted from the response, for people, majority votes and checks; null: none was found."""

    @model_validator(mode="before")
    @classmethod
    def _infer_status(cls, given: object) -> object:
        if isinstance(given, Mapping) and "status" not in given:
            is_scored = given.get("reward") is not None
            return {**given, "status": GradeStatus.SCORED if is_scored else GradeStatus.ABSTAINED}
        return given

    @model_validator(mode="after")
    def _status_goes_with_reward(self) -> Self:
        if (self.status is GradeStatus.SCORED) != (self.reward is not None):
            raise ValueError(f"status {self.status.value} does not go with reward {self.reward}")
        if self.status is GradeStatus.ERROR and not self.reason:
            raise ValueError("a grade with status error needs a reason")
        return self

    @classmethod
    def scored(cls, reward: float, **fields: Any) -> "Grade":
        """Make a grade that has ``reward``; an error grade if the reward is not finite."""
        if not abs(reward) < float("inf"):
            return cls.error(f"the reward is {reward}, which is not finite")
        answer = fields.get("answer")
        if type(reward) is float and not fields.keys() - {"answer"} and (answer is None or type(answer) is str):
            # As most are: all that there is to check was checked.
            return cls.of_checked(reward, {}, {}, answer and encodable(answer))
        return cls(status=GradeStatus.SCORED, reward=reward, **fields)

    @classmethod
    def of_checked(
        cls, reward: float, components: dict[str, float], metrics: dict[str, float], answer: str | None
    ) -> "Grade":
        """Make a grade that has a finite reward, of what other grades were made of."""
        values = {"status": GradeStatus.SCORED, "reward": reward, "components": components, "metrics": metrics}
        return assembled(cls, {**values, "reason": None, "answer": answer})

    @classmethod
    def abstained(cls, reason: str | None = None) -> "Grade":
        """Make a grade with which the grader abstains."""
        return cls(status=GradeStatus.ABSTAINED, reason=reason)

    @classmethod
    def error(cls, reason: str) -> "Grade":
        """Make a grade with the reason why grading failed."""
        return cls(status=GradeStatus.ERROR, reason=reason)


class GradingRequest(TolerantWire):
    """The body of the POST that a grader receives."""

    version: Literal[1] = GRADING_SCHEMA
    """Schema version of this message."""
    id: str
    """Names this request, the same at every retry: a grader that has answered it may answer the same again."""
    experiment: str
    """Id of the experiment that asks."""
    samples: tuple[GradingSample, ...] = Field(min_length=1)
    """What to grade."""
    callback_url: str | None = None
    """Where the answer may be posted later, after a 202. Null: the answer is expected at once."""


class GradingResponse(TolerantWire):
    """A grader's answer: one grade per sample, in the order of the request."""

    version: Literal[1] = GRADING_SCHEMA
    """Schema version of this message."""
    id: str | None = None
    """The request's id. Optional in a direct answer, required in a callback."""
    grades: tuple[Grade, ...]
    """As many as there were samples."""


class TakenGrading(TolerantWire):
    """What a grader's callback is answered."""

    id: str
    is_first: bool
    """False for a repetition of the same answer."""
