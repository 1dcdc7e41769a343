"""Which dataset rows become tasks, and how their prompts become tokens."""

import re
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import Field, JsonValue, create_model, field_validator, model_validator

from flotilla.shared.config.base.model import Config
from flotilla.shared.config.code_reference import CodeReference
from flotilla.shared.config.sections.curriculum import CurriculumConfig
from flotilla.shared.config.sections.images import ImagesConfig

DATA_SUFFIXES: Final = (".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".arrow")
"""Formats of files of rows, by the ending of their names."""
VERL_COLUMNS: Final = {
    "prompt_column": "prompt",
    "label_column": "reward_model.ground_truth",
    "data_source_column": "data_source",
}
HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
PLACE: Final = "{}"
MAX_RATIO: Final = 1000


def is_url(path: str) -> bool:
    """Return whether a path names a place that fsspec reaches, such as ``s3://bucket/train.parquet``."""
    return "://" in path


def is_data_file(path: str) -> bool:
    """Return whether a path names a file of rows, or a pattern of such files; else it is a folder of them."""
    return path.lower().endswith(DATA_SUFFIXES)


class RowsConfig(Config):
    """Where rows are, which of them are taken, and what their columns are called."""

    path: str | None = Field(None, min_length=1)
    """File, pattern such as `train-*.parquet`, or folder; local or a URL that fsspec reads, such as `s3://...`."""
    more_paths: tuple[str, ...] = ()
    """Further files, patterns or folders whose rows belong to these, after those of `path`."""
    hub: str | None = None
    """Dataset on the Hugging Face hub, as `owner/name`; needs `flotilla[hub]`."""
    custom: CodeReference | None = None
    """Class in a file of yours, as `rows.py:Rows` or `package.module:Rows`, called with `options`; it has `__len__` and
    `__getitem__`."""
    options: dict[str, JsonValue] | None = None
    """Keyword arguments of the custom class."""
    revision: str | None = Field(None, min_length=1)
    """Branch, tag or commit of the hub's dataset; null is its main branch as it is at each start."""
    subset: str | None = Field(None, min_length=1)
    """Configuration, or folder, of a hub dataset or of a folder laid out as one."""
    split: str | None = Field(None, min_length=1)
    """Split of a hub dataset or of a folder laid out as one; null is `train`."""
    max_rows: int | None = Field(None, ge=1)
    """Use the first rows only."""
    columns: dict[Literal["prompt", "label", "data_source"], str] = Field(default_factory=dict)
    """Names of the columns in these rows where they differ from those that `data` names."""
    data_source: str | None = None
    """Data source of all these rows, as if each had it in `data.data_source_column`."""
    only_data_sources: tuple[str, ...] | None = Field(None, min_length=1)
    """Take the rows of these data sources only."""

    @field_validator("hub")
    @classmethod
    def _hub_name(cls, name: str | None) -> str | None:
        if name is not None and not HUB_NAME.fullmatch(name):
            raise ValueError("must be a dataset's name on the hub, as owner/name; a path or URL belongs into path")
        return name

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        given = [name for name in ("path", "hub", "custom") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of path, hub and custom, got {' and '.join(given) or 'none'}")
        is_file = self.path is not None and is_data_file(self.path)
        for name, allowed, where in (
            ("options", self.custom is not None, "custom"),
            ("revision", self.hub is not None, "hub"),
            ("subset", self.custom is None and not is_file, "hub, or with a path that is a folder"),
            ("split", self.custom is None and not is_file, "hub, or with a path that is a folder"),
        ):
            if getattr(self, name) is not None and not allowed:
                raise ValueError(
                    f"{name} has no effect beside {given[0]} {getattr(self, given[0])!r}: use it with {where}"
                )
        if self.more_paths and self.path is None:
            raise ValueError("more_paths has an effect only beside path: give the first of them as path")
        if self.data_source is not None and (self.only_data_sources or "data_source" in self.columns):
            other = "only_data_sources" if self.only_data_sources else "columns.data_source"
            raise ValueError(f"data_source replaces the data source of each row, so {other} has no effect: drop one")
        return self

    def location(self) -> str:
        """Name the place of the rows, for messages."""
        if self.path is not None and self.more_paths:
            return ", ".join((self.path, *self.more_paths))
        return self.path or self.custom or f"hub dataset {self.hub}"


class SourceConfig(RowsConfig):
    """One of several sets of training rows."""

    weight: float | None = Field(None, ge=0)
    """Share of the tasks that come from here, relative to the other weights: 0 is none, which can change while it
    runs; null everywhere: all rows count alike."""

    @property
    def known_data_sources(self) -> tuple[str, ...]:
        """The data sources that all its rows are known to have; nothing where rows tell."""
        return (self.data_source,) if self.data_source is not None else self.only_data_sources or ()


class ErrorOverlongConfig(Config):
    """A prompt that is too long fails its task, which is counted as `prompt_too_long` and replaced by another."""

    kind: Literal["error"] = "error"


class TruncateOverlongConfig(Config):
    """A prompt that is too long loses tokens, after the template was applied."""

    kind: Literal["truncate"]
    side: Literal["left", "right", "middle"]
    """Where tokens are dropped: left keeps the last, right the first, middle the first and the last half."""


class FilterOverlongConfig(Config):
    """Rows whose prompt is too long are left out when the dataset is loaded."""

    kind: Literal["filter"]
    workers: int = Field(1, ge=1, le=256)
    """Processes that tokenise the prompts, on the gateway's machine."""


OverlongConfig = Annotated[
    ErrorOverlongConfig | TruncateOverlongConfig | FilterOverlongConfig, Field(discriminator="kind")
]


RENDERING: Final = frozenset(
    {"conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
     "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"}
)  # fmt: skip
"""Arguments of a tokenizer's own rendering, which are no variables of a template."""


FROM: Final = "from"
"""Key that Python has no name for."""
if TYPE_CHECKING:
    _SubscribedConfig = Config
else:
    _SubscribedConfig = create_model(
        "_SubscribedConfig",
        __base__=Config,
        __module__=__name__,
        **{
            FROM: (
                str | None,
                Field(
                    None,
                    min_length=1,
                    description="Train the groups that another experiment of the fleet samples and grades, as it does "
                    "and while it does, instead of sampling any: its id, or its name (the newest of it). Sources, if "
                    "they are named too, are not read. See docs/jobs.md.",
                ),
            )
        },
    )


class DataConfig(_SubscribedConfig):
    """Training prompts: one row, one task per epoch."""

    path: str | None = Field(None, min_length=1)
    """File, pattern or folder of rows: short for `sources: [{path: ...}]`. A relative path is taken from the spec
    file's folder."""
    sources: tuple[SourceConfig, ...] | None = Field(None, min_length=1)
    """Several sets of rows, or one that is no plain path. Without weights they are joined into one."""
    dump: str | None = Field(None, min_length=1)
    """Train groups that a run kept as samples, in their order, instead of sampling any: the directory of a run or of
    an experiment, its folder `samples`, or one file of it. Sources, if they are named too, say what prompts the groups
    are of, and are not read. See docs/jobs.md."""
    format: Literal["columns", "verl"] = "columns"
    """`verl`: rows as verl's `data_source, prompt, ability, reward_model, extra_info`; it names the three columns."""
    prompt_column: str = Field("prompt", min_length=1)
    """Column with the user's text, or with a list of {role, content} messages. A dot reaches into a structure."""
    input_column: str | None = Field(None, min_length=1)
    """Column with text that follows the prompt's on a new line, as Alpaca's `input` follows its `instruction`; a row
    in which it is empty or absent has the prompt alone. Null: the prompt is one column."""
    label_column: str | None = Field("label", min_length=1)
    """Column that verifiers compare with, such as `reward_model.ground_truth`; null if the dataset has none. Rows may
    lack `label` where nothing reads it, as under an environment that grades its own episodes."""
    data_source_column: str | None = Field(None, min_length=1)
    """Column whose value chooses among verifiers; null if there is one verifier for all."""
    system_prompt: str | None = None
    """Put before each prompt as a system message."""
    input_template: str | None = None
    """Text with `{}` where the prompt goes, instead of the model's chat template; `{}` alone leaves the prompt as it
    is. Escapes are YAML's: `"Q: {}\\nA:"`. No special tokens are added."""
    chat_template_options: dict[str, JsonValue] = Field(default_factory=dict)
    """Variables of the model's chat template, such as `enable_thinking: false`."""
    images: ImagesConfig | None = None
    """Images in the prompts; null: `<image>` is text like any other."""
    curriculum: CurriculumConfig | None = None
    """Pools of rows by how well they were answered so far; null: rows take turns."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longest prompt in tokens; null is what the engine's context leaves beside a completion."""
    overlong: OverlongConfig = ErrorOverlongConfig()
    """What becomes of a longer prompt."""
    max_rows: int | None = Field(None, ge=1)
    """Use the first rows only, of all sources together."""
    shuffle: bool = True
    """Draw each epoch in another order; false issues rows in the order of the files."""

    @model_validator(mode="before")
    @classmethod
    def _columns_of_the_format(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("format") != "verl":
            return given
        for name, column in VERL_COLUMNS.items():
            if given.get(name, column) != column:
                raise ValueError(f"format verl makes {name} {column!r}, got {given[name]!r}: drop one of the two")
        return {**given, **VERL_COLUMNS}

    @field_validator("input_template")
    @classmethod
    def _one_place_for_the_prompt(cls, template: str | None) -> str | None:
        if template is not None and template.count(PLACE) != 1:
            raise ValueError(f"must hold {PLACE} exactly once, where the prompt goes")
        return template

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        given = [name for name in ("path", "sources") if getattr(self, name) is not None]
        if len(given) == 2 or not (given or self.holds_groups):
            raise ValueError(f"give either path or sources, got {'both' if given else 'neither'}")
        if self.subscribes_to is None:
            return self
        for name in ("dump", "max_rows", "curriculum"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name} has no effect beside from {self.subscribes_to}, whose groups are trained as they come: "
                    "leave one of the two out"
                )
        return self

    @model_validator(mode="after")
    def _rows_are_named_once(self) -> Self:
        for number, source in enumerate(self.sources or ()):
            check_data_source_column(source, f"sources.{number}", self)
        return self

    @model_validator(mode="after")
    def _weights_are_of_all(self) -> Self:
        weighted = [source.weight is not None for source in self.sources or ()]
        if any(weighted) and not all(weighted):
            raise ValueError(f"sources.{weighted.index(False)}.weight is missing: give every source a weight, or none")
        if len(weighted) == 1 and any(weighted):
            raise ValueError("sources.0.weight has no effect: there is no other source to weigh against")
        weights = [source.weight for source in self.sources or () if source.weight is not None]
        taken = [weight for weight in weights if weight]
        if weights and not taken:
            raise ValueError("sources.*.weight is 0 for all: no row would be taken, give one of them more")
        if taken and max(taken) > MAX_RATIO * min(taken):
            raise ValueError(f"sources.*.weight: the largest may be at most {MAX_RATIO} times the smallest above 0")
        if self.max_rows is not None and any(weighted):
            raise ValueError("max_rows has no effect beside weights: set max_rows of each source")
        return self

    @model_validator(mode="after")
    def _rows_have_one_order(self) -> Self:
        if self.curriculum is not None and any(source.weight is not None for source in self.sources or ()):
            raise ValueError("curriculum has no effect beside weights of sources: leave one of them out")
        return self

    @model_validator(mode="after")
    def _one_template(self) -> Self:
        for name in ("system_prompt", "chat_template_options"):
            if self.input_template is not None and getattr(self, name):
                raise ValueError(f"{name} has no effect beside input_template, which has no messages: drop one")
        if self.input_template is not None and self.images is not None:
            raise ValueError("images have no place in input_template: drop one")
        taken = next((name for name in self.chat_template_options if name in RENDERING), None)
        if taken is not None:
            raise ValueError(f"chat_template_options.{taken} is what the fleet itself gives to the template: remove it")
        return self

    @property
    def subscribes_to(self) -> str | None:
        """The experiment whose groups are trained; what ``from`` says."""
        named: str | None = getattr(self, FROM)
        return named

    @property
    def holds_groups(self) -> bool:
        """Whether the data holds, or supplies, groups that were sampled and graded elsewhere."""
        return self.dump is not None or self.subscribes_to is not None

    @property
    def all_sources(self) -> tuple[SourceConfig, ...]:
        """The sources, however they were written; a dump in their place, none where another's groups are trained."""
        if self.subscribes_to is not None:
            return ()
        if self.dump is not None:
            return (SourceConfig(path=self.dump),)
        return self.sources if self.sources is not None else (SourceConfig(path=self.path),)


def check_data_source_column(rows: RowsConfig, where: str, data: DataConfig) -> None:
    """Check that what names data sources has a column to name them in.

    Raises:
        ValueError: it has none.
    """
    for name, value in (
        ("data_source", rows.data_source),
        ("only_data_sources", rows.only_data_sources),
        ("columns.data_source", rows.columns.get("data_source")),
    ):
        if value is not None and data.data_source_column is None:
            raise ValueError(f"{where}.{name} needs data.data_source_column: name a column there")
    if "label" in rows.columns and data.label_column is None:
        raise ValueError(f"{where}.columns.label needs data.label_column: name a column there")
