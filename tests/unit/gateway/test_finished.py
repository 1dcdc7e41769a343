"""Rows with answers become groups: which tokens are learned, and which rows are refused."""

import re
from contextlib import ExitStack
from typing import Any, cast

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.datasets.finished import FinishedGroups, balance_of, check_rows
from flotilla.services.gateway.datasets.length_worker import render
from flotilla.services.gateway.datasets.made import HeldOutRows
from flotilla.services.gateway.feeder.feeder import Feeder
from flotilla.services.gateway.feeder.rows import RowOrder
from flotilla.shared.clock import ManualClock
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.sections.job import KtoConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import DataError, NotFound, Unavailable
from flotilla.shared.models.prompts import PromptTemplate
from flotilla.shared.schemas.trajectory import NO_VERSION, GradeStatus, Group
from flotilla.shared.streams.hop import HopName
from tests.unit.gateway.builders import a_gateway, add_experiment

CHATML = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
FORGETS = (
    "{% for m in messages %}<{{ m.role }}> "
    "{{ m.content if loop.last or m.role == 'user' else 'x' }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
"""Writes earlier answers in another way than the last one, as templates do that leave thoughts out."""
WORDS = ["<end>", "<user>", "<assistant>", "<system>", "hi", "a", "b", "c", "x"]


def a_tokenizer(template: str | None = CHATML) -> Any:
    raw = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="x"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", chat_template=template)


class InThisProcess:
    """Renders as the child process does."""

    def __init__(self, tokenizer: Any, template: PromptTemplate) -> None:
        self._tokenizer, self._template = tokenizer, template

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        return render(self._tokenizer, self._template, request["conversations"], request["starts"])


def spec_of(data: dict[str, Any] | None = None, **job: Any) -> ExperimentSpec:
    document = {
        "name": "job",
        "model": {"path": "/nowhere"},
        "data": {"path": "rows.jsonl", "label_column": None, "shuffle": False} | (data or {}),
        "optimisation": {"steps": 30, "groups_per_mini_batch": 2},
        "job": job,
    }
    return validate_spec(document)


def groups_of(spec: ExperimentSpec, rows: list[dict[str, Any]], tokenizer: Any = None) -> list[Group]:
    dataset = Dataset(rows, spec.data, spec.seed)
    assert spec.finished_job is not None
    check_rows(dataset, spec.finished_job, "data")
    return a_maker(spec, tokenizer).groups(dataset, range(len(rows)))


def a_maker(spec: ExperimentSpec, tokenizer: Any = None) -> FinishedGroups:
    made = InThisProcess(tokenizer or a_tokenizer(), PromptTemplate.of(spec.data))
    return FinishedGroups(spec, cast(Any, lambda _stack: made))


def learned(group: Group, member: int = 0) -> str:
    """Write the tokens, those that are learned in brackets."""
    trajectory = group.trajectories[member]
    pairs = zip(trajectory.token_ids.tolist(), trajectory.loss_mask.tolist(), strict=True)
    return " ".join(f"[{WORDS[token]}]" if mask else WORDS[token] for token, mask in pairs)


CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "b c"},
]


def test_all_turns_of_the_assistant_are_learned_and_nothing_else() -> None:
    [group] = groups_of(spec_of(kind="sft"), [{"prompt": CHAT}])

    assert learned(group) == "<user> hi <end> <assistant> [a] [<end>] <user> hi <end> <assistant> [b] [c] [<end>]"
    [answer] = group.trajectories
    assert (answer.versions, answer.reward, answer.status) == (((0, NO_VERSION),), 1.0, GradeStatus.SCORED)


def test_the_last_turn_alone_may_be_learned() -> None:
    [group] = groups_of(spec_of(kind="sft", train_on="last"), [{"prompt": CHAT}])

    assert learned(group) == "<user> hi <end> <assistant> a <end> <user> hi <end> <assistant> [b] [c] [<end>]"


def test_every_token_but_the_first_may_be_learned() -> None:
    rows = [{"prompt": CHAT}]
    [group] = groups_of(spec_of(kind="sft", train_on="every_token"), rows)
    [cut] = groups_of(spec_of(kind="sft", train_on="every_token", max_tokens=3, overlong="truncate"), rows)

    whole = "<user> [hi] [<end>] [<assistant>] [a] [<end>] [<user>] [hi] [<end>] [<assistant>] [b] [c] [<end>]"
    assert learned(group) == whole
    assert (learned(cut), cut.trajectories[0].reward) == ("<user> [hi] [<end>]", 1.0)


def test_every_token_of_a_template_that_rewrites_earlier_turns_may_be_learned() -> None:
    spec = spec_of(kind="sft", train_on="every_token")
    [group] = groups_of(spec, [{"prompt": CHAT}], a_tokenizer(FORGETS))

    assert learned(group).startswith("<user> [hi] [<end>] [<assistant>] [x]")


def test_an_answer_may_be_a_column_of_its_own() -> None:
    spec = spec_of({"system_prompt": "x"}, kind="sft", response_column="answer")
    [group] = groups_of(spec, [{"prompt": "hi", "answer": "a b"}])

    assert learned(group) == "<system> x <end> <user> hi <end> <assistant> [a] [b] [<end>]"
    assert [message.content for message in group.task.messages] == ["x", "hi"]


def test_a_template_that_changes_earlier_turns_is_refused_by_name_and_its_last_turn_works() -> None:
    tokenizer = a_tokenizer(FORGETS)
    with pytest.raises(DataError, match=r"row 0 .*train_on: last"):
        groups_of(spec_of(kind="sft"), [{"prompt": CHAT}], tokenizer)

    [group] = groups_of(spec_of(kind="sft", train_on="last"), [{"prompt": CHAT}], tokenizer)
    assert learned(group).endswith("x <end> <user> hi <end> <assistant> [b] [c] [<end>]")


def test_a_base_model_learns_the_answer_and_its_end() -> None:
    spec = spec_of({"input_template": "x {} x"}, kind="sft", response_column="answer")
    [group] = groups_of(spec, [{"prompt": "hi", "answer": "a"}], a_tokenizer(None))

    assert learned(group) == "x hi x [a] [<end>]"
    with pytest.raises(DataError, match="several turns need a chat template"):
        groups_of(spec_of(kind="sft"), [{"prompt": CHAT}], a_tokenizer(None))


@pytest.mark.parametrize("whole", [False, True])
def test_a_pair_is_a_group_of_two(whole: bool) -> None:
    if whole:
        spec = spec_of({"prompt_column": "chosen"}, kind="preference")
        row = {"chosen": CHAT, "rejected": [*CHAT[:3], {"role": "assistant", "content": "a"}]}
    else:
        spec = spec_of(kind="preference")
        row = {"prompt": CHAT[:3], "chosen": "b c", "rejected": "a"}
    [group] = groups_of(spec, [row])

    prompt = "<user> hi <end> <assistant> a <end> <user> hi <end> <assistant>"
    assert learned(group) == f"{prompt} [b] [c] [<end>]"
    assert learned(group, 1) == f"{prompt} [a] [<end>]"
    assert group.rewards() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("job", "row"),
    [
        ({"response_column": "completion"}, {"prompt": "hi", "completion": "a b"}),
        (
            {"response_column": "completion"},
            {"prompt": CHAT[:1], "completion": [{"role": "assistant", "content": "a b"}]},
        ),
        ({}, {"prompt": [CHAT[0], {"role": "assistant", "content": "a b"}]}),
    ],
    ids=["texts", "messages", "whole"],
)
@pytest.mark.parametrize(
    ("label", "reward"),
    [(True, 1.0), (False, 0.0), (1, 1.0), (0, 0.0), (1.0, 1.0), ("True", 1.0), ("false", 0.0), ("0", 0.0)],
    ids=repr,
)
def test_an_answer_with_a_label_is_a_group_of_one(
    job: dict[str, Any], row: dict[str, Any], label: Any, reward: float
) -> None:
    [group] = groups_of(spec_of(kind="kto", **job), [row | {"label": label}])

    assert learned(group) == "<user> hi <end> <assistant> [a] [b] [<end>]"
    assert [(each.reward, each.status) for each in group.trajectories] == [(reward, GradeStatus.SCORED)]


@pytest.mark.parametrize("label", [None, 2, "good", [True], 0.5], ids=repr)
def test_a_label_that_is_neither_true_nor_false_is_named_with_its_row(label: Any) -> None:
    rows = [{"prompt": "hi", "completion": "a", "desirable": True}, {"prompt": "hi", "completion": "a"}]
    rows[1] |= {} if label is None else {"desirable": label}

    with pytest.raises(DataError, match=r"row 1 has .*'desirable': a label is true or false"):
        groups_of(spec_of(kind="kto", response_column="completion", label_column="desirable"), rows)


@pytest.mark.parametrize(
    ("labels", "weights", "says"),
    [
        ([True, False], {}, "data: 1 rows are desirable, 1 undesirable"),
        ([True] * 8 + [False] * 2, {}, "weigh 4 times as much as the others, .* job.undesirable_weight to 3 to 4"),
        ([True] * 8 + [False] * 2, {"undesirable_weight": 3.5}, "data: 8 rows are desirable, 2 undesirable"),
        ([True] + [False] * 4, {"undesirable_weight": 0.5}, "weigh 0.5 times .* job.desirable_weight to 2 to 2.67"),
        ([True] * 3, {}, "one label alone"),
    ],
    ids=["even", "many", "weighed", "few", "one"],
)
def test_unequal_labels_are_said_with_the_weights_that_would_balance_them(
    labels: list[bool], weights: dict[str, float], says: str
) -> None:
    spec = spec_of(kind="kto", response_column="completion", **weights)
    rows = [{"prompt": "hi", "completion": "a", "label": label} for label in labels]
    assert isinstance(spec.job, KtoConfig)

    assert re.search(says, balance_of(Dataset(rows, spec.data, spec.seed), spec.job))


def test_what_is_too_long_is_left_out_or_cut() -> None:
    rows = [{"prompt": "hi", "answer": "a b c"}, {"prompt": "hi", "answer": "a"}]
    filtered = groups_of(spec_of(kind="sft", response_column="answer", max_tokens=6), rows)
    cut = groups_of(spec_of(kind="sft", response_column="answer", max_tokens=6, overlong="truncate"), rows)

    assert [t.status for group in filtered for t in group.trajectories] == [GradeStatus.ABSTAINED, GradeStatus.SCORED]
    assert learned(cut[0]) == "<user> hi <end> <assistant> [a] [b]"
    with pytest.raises(DataError, match="none of 2 rows has at most 2 tokens"):
        groups_of(spec_of(kind="sft", response_column="answer", max_tokens=2), rows)


@pytest.mark.parametrize(
    ("job", "row", "says"),
    [
        ({"kind": "sft"}, {"prompt": CHAT[:3]}, "ends with a message of 'user'"),
        ({"kind": "sft", "response_column": "answer"}, {"prompt": "hi"}, "column 'answer' no list of messages"),
        ({"kind": "preference"}, {"prompt": "hi", "chosen": "a", "rejected": 3}, "must be text or a list"),
    ],
)
def test_a_row_without_its_answers_is_named(job: dict[str, Any], row: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says) as refused:
        groups_of(spec_of(**job), [row])

    assert refused.value.detail.startswith("data: ")


async def test_the_feeder_issues_them_to_the_trainer_whatever_was_consumed() -> None:
    gateway = a_gateway()
    spec = spec_of(kind="sft", response_column="answer")
    experiment = await add_experiment(gateway, spec=spec.model_dump(mode="json"))
    rows = [{"prompt": "hi", "answer": "a"}, {"prompt": "hi", "answer": "b"}, {"prompt": "hi", "answer": "c"}]
    dataset, status = Dataset(rows, spec.data, spec.seed), gateway.feeder_status.of(experiment)
    feeder = Feeder(experiment, RowOrder(experiment, dataset), gateway.store, ManualClock(), status, a_maker(spec))

    assert await feeder.feed() > 0.0, "all that is admitted was issued at once"

    trainer = experiment.train.trainer("trainer")
    await trainer.take_over()
    claims = await trainer.hop.claim(100, wait_seconds=0.0)
    assert [claim.header.group_id for claim in claims] == list(range(8)), "four steps of two groups ahead"
    assert [claim.task().row for claim in claims] == [0, 1, 2, 0, 1, 2, 0, 1], "epochs follow each other"
    for step in range(4):
        assert await trainer.plan(step + 1, claims[2 * step : 2 * step + 2], version=0)
    await feeder.feed()  # Nothing was published, and it goes on.
    assert (await experiment.train.ledger()).waiting.scored == 8
    assert (await experiment.train.hop(HopName.TASKS, "r").claim(1, wait_seconds=0.0)) == []


def test_held_out_rows_are_given_out_in_pages_while_the_experiment_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla.services.gateway.datasets.made.PAGE_ROWS", 2)
    spec = spec_of(kind="sft", response_column="answer", max_tokens=6)
    rows = [{"prompt": "hi", "answer": "a b c" if number == 1 else "a"} for number in range(3)]
    held_out = HeldOutRows()
    with pytest.raises(Unavailable):
        held_out.page(0)
    held_out.open(a_maker(spec), Dataset(rows, spec.data, spec.seed))

    first, second = held_out.page(0), held_out.page(2)

    assert (len(first.rows), first.next, len(second.rows), second.next) == (1, 2, 1, None)
    assert sum(second.rows[0][0].loss_mask) == 2
    with pytest.raises(NotFound):
        held_out.page(3)


def test_a_process_that_died_is_started_again() -> None:
    spec = spec_of(kind="sft", response_column="answer")
    opened: list[ExitStack] = []

    class Dies(InThisProcess):
        def ask(self, request: dict[str, Any]) -> dict[str, Any]:
            if len(opened) == 1:
                raise DataError("a process that counts prompts' tokens ended with exit code -9")
            return super().ask(request)

    def open_process(stack: ExitStack) -> Any:
        opened.append(stack)
        return Dies(a_tokenizer(), PromptTemplate())

    maker = FinishedGroups(spec, open_process)
    groups = maker.groups(Dataset([{"prompt": "hi", "answer": "a"}], spec.data, 0), range(1))

    assert (len(groups), len(opened)) == (1, 2)
