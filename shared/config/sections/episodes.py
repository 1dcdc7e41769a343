"""How an episode goes: one prompt and one completion, or many turns with an environment or tools."""

import re
from typing import Annotated, Final, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from flotilla.shared.config.base.model import Config
from flotilla.shared.config.code_reference import CodeReference, code_reference

ENVIRONMENTS: Final = ("frozen_lake", "sokoban", "countdown", "word_game")
"""Environments that the fleet has itself."""
GYMNASIUM: Final = "gymnasium:"
"""What the name of one of gymnasium's begins with."""
OPENENV: Final = "openenv:"
"""What the name of one behind an OpenEnv server begins with."""
USER: Final = "user:"
"""What the name of a user begins with whom a model behind a chat endpoint plays."""
SERVER: Final = re.compile(r"(openenv|user):https?://[^\s/?#@]+(/[^\s?#]*)?")
REGISTERED: Final = re.compile(r"gymnasium:[\w.-]+(/[\w.-]+)?")
"""Without a further colon: gymnasium imports the module that is named before one."""


class SingleTurnConfig(Config):
    """One prompt, one completion."""

    kind: Literal["single_turn"] = "single_turn"


class MemoryConfig(Config):
    """What a turn with a prompt of its own is shown of the turns before it, as `{history}` of `turn_template`."""

    turns: int = Field(0, ge=0)
    """How many turns back; 0: nothing."""
    template: str = "Turn {turn}\n{observation}\n{action}"
    """What each of them is written as: a text with `{turn}`, `{observation}`, `{action}` and `{reward}`; an empty one
    leaves them out."""
    invalid_template: str | None = None
    """The same of a turn whose text the environment could not read as an action; null: no other than `template`."""
    separator: str = "\n"
    """Between two of them."""


HISTORY_PLACES: Final = ("{history}", "{turns_taken}", "{turns_remembered}", "{instruction}")
"""Places of a turn's template that only a turn with a prompt of its own has."""


class EnvironmentConfig(Config):
    """One environment."""

    environment: str
    """`frozen_lake`, `sokoban`, `countdown`, `word_game`; a class in a file of yours, as `lake.py:Lake` or
    `package.module:Lake`, with `reset(seed)` and `step(text)`; one of gymnasium's whose actions are numbers or
    text, such as `gymnasium:CliffWalking-v1`; an OpenEnv server, as `openenv:http://127.0.0.1:8000`; or a user whom a
    model behind an OpenAI-compatible endpoint plays, as `user:http://127.0.0.1:8000/v1`."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    data_sources: tuple[str, ...] | None = Field(None, min_length=1)
    """Use it for tasks of these data sources; null: for all."""
    turn_template: str | None = None
    """What each of the user's messages is made of: a text with `{observation}` in it and, where they are wanted,
    `{turn}`, counted from 1, and `{turns_left}`; with `memory` also `{history}`, `{turns_taken}`, `{turns_remembered}`
    and `{instruction}` (the environment's own). null: the observation alone."""
    memory: MemoryConfig | None = None
    """null: each turn is shown the whole conversation. Else each turn has a prompt of its own, the task's messages and
    `turn_template`, and is trained as a sequence of its own; `max_tokens` then bounds each turn by itself."""

    @field_validator("turn_template")
    @classmethod
    def _shows_what_is_seen(cls, template: str | None) -> str | None:
        if template is not None and "{observation}" not in template:
            raise ValueError("must have {observation} in it, else the policy sees nothing of the environment")
        return template

    @model_validator(mode="after")
    def _remembers_what_it_shows(self) -> Self:
        used = [place for place in HISTORY_PLACES if place in (self.turn_template or "")]
        if self.memory is None and used:
            raise ValueError(
                f"turn_template has {used[0]}, and without memory each turn is shown the whole conversation: set "
                "memory, or remove it from the template"
            )
        if self.memory is not None and self.memory.turns and "{history}" not in used:
            raise ValueError(
                "memory.turns has no effect, since turn_template has no {history}: add it, or set memory.turns to 0"
            )
        return self

    @property
    def is_code(self) -> bool:
        """Whether it is in a file of the user's."""
        return self.environment not in ENVIRONMENTS and not self.environment.startswith((GYMNASIUM, OPENENV, USER))

    @property
    def is_user(self) -> bool:
        """Whether a model plays a user."""
        return self.environment.startswith(USER)

    @property
    def is_server(self) -> bool:
        """Whether it is behind a URL."""
        return self.environment.startswith((OPENENV, USER))

    @field_validator("environment")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        if name in ENVIRONMENTS or REGISTERED.fullmatch(name) or SERVER.fullmatch(name):
            return name
        if ":" in name and not name.startswith((GYMNASIUM, OPENENV, USER)):
            return code_reference(name)
        raise ValueError(
            f"must be one of {', '.join(ENVIRONMENTS)}, a class in a Python file as lake.py:Lake, gymnasium:NAME, "
            "openenv:http://HOST:PORT, or user:http://HOST:PORT/v1"
        )


class TurnLimits(Config):
    """What bounds an episode of many turns."""

    max_turns: int = Field(10, ge=1)
    """Completions of one episode."""
    max_tokens: int | None = Field(None, ge=2)
    """Tokens of one episode, those that were not sampled included; null is the engine's context."""
    max_response_tokens: int | None = Field(None, ge=1)
    """Tokens of one episode after its first prompt, observations and results of tools included; null sets no bound
    beside `max_tokens`."""
    step_seconds: float = Field(60.0, gt=0)
    """Time for one step of an environment or one call of a tool; one that takes longer is an error of the episode."""
    history: Literal["append", "branch"] = "append"
    """What the policy is shown of earlier turns where the chat template would render them in another way than they
    were sampled, such as without their thoughts. append: what was sampled, as it was. branch: what the template makes
    of the whole conversation; such a turn begins a new sequence, in which earlier answers are context."""


class EnvironmentEpisodesConfig(TurnLimits):
    """Turns with an environment, which answers each completion with an observation and a reward.

    The row's column `seed`, a whole number, seeds the environment; a row without one has the task's seed. All members
    of a group begin in the same state.
    """

    kind: Literal["environment"]
    environments: tuple[EnvironmentConfig, ...] = Field(min_length=1)
    """One, or several of which each task takes the first that is for its data source."""
    redundant_members: int = Field(0, ge=0)
    """Play so many episodes more than `rollout.group_size` of each task; the first that are finished without an error
    are the group, and the others are ended. A group so does not wait for its slowest, nor lack what failed. It favours
    short episodes. Evaluation plays none more."""

    @model_validator(mode="after")
    def _each_can_be_reached(self) -> Self:
        for number, each in enumerate(self.environments[:-1]):
            if each.data_sources is None:
                raise ValueError(
                    f"environments.{number} is for all tasks, so that those after it have no effect: give it "
                    "data_sources, or put it last"
                )
        return self


ToolFormat = Literal["hermes", "qwen", "llama"]


class PythonToolConfig(Config):
    """A function of yours; its signature, type hints and docstring are what the policy is shown."""

    kind: Literal["python"]
    path: CodeReference
    """`file.py:function`, or `package.module:function` of a package in the spec file's folder; an attribute `schema` of
    the function replaces what its signature says."""


class HttpToolConfig(Config):
    """A tool behind a URL, to which its name and arguments are posted."""

    kind: Literal["http"]
    url: str = Field(pattern=r"^https?://\S+$")
    """Where to."""
    tool_schema: str | dict[str, JsonValue]
    """The function as OpenAI describes it, or a JSON file that holds it."""

    @field_validator("tool_schema")
    @classmethod
    def _names_a_function(cls, schema: str | dict[str, JsonValue]) -> str | dict[str, JsonValue]:
        function = schema.get("function") if isinstance(schema, dict) else {"name": "in the file"}
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("must be {type: function, function: {name: ..., description: ..., parameters: ...}}")  # noqa: TRY004
        return schema


class McpToolsConfig(Config):
    """All tools of an MCP server; needs `flotilla[mcp]`."""

    kind: Literal["mcp"]
    command: tuple[str, ...] | None = Field(None, min_length=1)
    """Program and arguments of a server that talks over its standard input and output."""
    url: str | None = Field(None, pattern=r"^https?://\S+$")
    """Address of a server that talks streamable HTTP."""
    only: tuple[str, ...] | None = Field(None, min_length=1)
    """Names of the tools to offer; null: all."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError(f"give either command or url, got {'neither' if self.url is None else 'both'}")
        return self


CHECK_SECONDS = 60.0


class CodeInterpreterConfig(Config):
    """A Python interpreter or a shell in the sandbox; what one call of an episode leaves is there for the next one."""

    kind: Literal["code_interpreter"]
    name: str = Field("code_interpreter", pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")
    """What the policy calls it; its one argument is `code`."""
    language: Literal["python", "shell"] = "python"
    """What `code` is: Python of one interpreter, or commands, each of a shell of its own in the same files."""
    image_column: str | None = Field(None, min_length=1)
    """Column of the rows with the image of each task's sandbox, whose service must have a provider of boxes. Null: what
    the service has set."""
    check_column: str | None = Field(None, min_length=1)
    """Column of the rows with commands that grade what the episode leaves, run in its sandbox when the policy has
    ended or `max_turns` are over: a reward of 1 if they succeed, else 0, for a component of kind `environment`."""
    check_seconds: float = Field(CHECK_SECONDS, gt=0, le=300)
    """Time for those commands."""
    description: str | None = None
    """How it is described to the policy; null: the default text."""
    run_seconds: float = Field(5.0, gt=0, le=300)
    """Time for the code of one call, which is interrupted then."""
    cpu_seconds: float = Field(300.0, gt=0, le=3600)
    """Processor time of all calls of an episode."""
    idle_seconds: float = Field(300.0, gt=0, le=86400)
    """An interpreter that is not called for so long is ended; the next call starts another one, and its result says
    so."""
    memory_megabytes: int | None = Field(None, ge=1)
    """Memory of one interpreter; null, and anything above it: the sandbox's own limit."""

    @model_validator(mode="after")
    def _is_graded_from_outside(self) -> Self:
        if self.check_column is not None and self.language == "python":
            raise ValueError(
                "check_column needs language shell: what grades would run in the interpreter in which the policy's "
                "code has run, and could be deceived by it"
            )
        if self.check_column is None and self.check_seconds != CHECK_SECONDS:
            raise ValueError("check_seconds has no effect without check_column: leave it out, or name a column")
        return self


ToolConfig = Annotated[
    PythonToolConfig | HttpToolConfig | McpToolsConfig | CodeInterpreterConfig, Field(discriminator="kind")
]


class ToolEpisodesConfig(TurnLimits):
    """Turns with tools: an answer that calls some receives their results; one without a call ends the episode."""

    kind: Literal["tools"]
    tools: tuple[ToolConfig, ...] = Field(min_length=1)
    """What may be called; the model's chat template is given their schemas as `tools`."""
    format: ToolFormat = "hermes"
    """How the model writes calls: hermes and qwen as JSON between <tool_call> tags, llama as bare JSON."""
    max_parallel_calls: int = Field(8, ge=1)
    """Calls of one answer that are made; the others receive an error."""
    max_result_characters: int = Field(4000, ge=100)
    """A longer result loses its middle."""

    @property
    def runs_code(self) -> bool:
        """Whether a tool needs a sandbox."""
        return any(isinstance(tool, CodeInterpreterConfig) for tool in self.tools)

    @property
    def checks(self) -> tuple[str, ...]:
        """Columns with code that grades what an episode leaves."""
        found = (tool.check_column for tool in self.tools if isinstance(tool, CodeInterpreterConfig))
        return tuple(column for column in found if column is not None)

    @model_validator(mode="after")
    def _cells_end_in_time(self) -> Self:
        if len(self.checks) > 1:
            raise ValueError(f"tools have {len(self.checks)} check_column, and an episode has one grade: keep one")
        for number, tool in enumerate(self.tools):
            most = tool.run_seconds * self.max_parallel_calls if isinstance(tool, CodeInterpreterConfig) else 0.0
            if most > self.step_seconds:
                raise ValueError(
                    f"tools.{number}.run_seconds times max_parallel_calls is {most:g} s, since calls of one "
                    f"interpreter wait for each other, and step_seconds is {self.step_seconds:g}: lower the former or "
                    "raise the latter"
                )
        return self


EpisodesConfig = Annotated[
    SingleTurnConfig | EnvironmentEpisodesConfig | ToolEpisodesConfig, Field(discriminator="kind")
]
"""How an episode goes, chosen by ``kind``."""

ALONG_AN_EPISODE: Final = frozenset(
    {"gae", "reinforce", "reinforce_plus_plus", "turn_reinforce", "remax", "optimal_token_baseline"}
)
"""Estimators that carry rewards from later turns to earlier ones within one sequence."""


def check_sequences(episodes: EpisodesConfig, estimator: str, *, asks_teachers: bool, cuts: bool) -> None:
    """Check what does not go with episodes of several sequences: turns with prompts of their own, and branches.

    Args:
        episodes: of the spec.
        estimator: its kind.
        asks_teachers: whether teachers behind URLs read trajectories.
        cuts: whether prompts that are too long are cut.

    Raises:
        ValueError: something of it is asked for.
    """
    if isinstance(episodes, SingleTurnConfig):
        return
    environments = episodes.environments if isinstance(episodes, EnvironmentEpisodesConfig) else ()
    number = next((at for at, each in enumerate(environments) if each.memory is not None), None)
    memory = None if number is None else f"rollout.episodes.environments.{number}.memory"
    if memory is not None and episodes.history == "branch":
        raise ValueError(
            f"rollout.episodes.history branch has no effect beside {memory}, whose turns have prompts of their own: "
            "remove one of both"
        )
    if memory is not None:
        what, undo = f"{memory} makes each turn a sequence of its own, which does not go with", "remove memory"
    elif episodes.history == "branch":
        what = "rollout.episodes.history branch makes several sequences of an episode, which does not go with"
        undo = "let history be append"
    else:
        return
    if cuts and memory is None:
        raise ValueError(
            f"{what} data.overlong.kind truncate: a branch renders the conversation from its beginning, uncut. Let it "
            "be filter or error, or let history be append"
        )
    for is_asked, name, way in (
        (estimator in ALONG_AN_EPISODE, f"algorithm.advantage.kind {estimator}",
         "use gigpo or step_reinforce, or one that compares episodes, such as grpo"),
        (episodes.max_response_tokens is not None, "rollout.episodes.max_response_tokens",
         "remove it (max_tokens bounds each sequence)"),
        (asks_teachers, "algorithm.distillation.servers",
         "let the trainer load the teacher (algorithm.distillation.path)"),
    ):  # fmt: skip
        if is_asked:
            raise ValueError(f"{what} {name}: {way}, or {undo}")
