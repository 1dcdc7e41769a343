"""Each row of the embedded engine's table samples two turns over two updates; a naive reading agrees with all of it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn

from flotilla.services.rollout.engines.base import Completion, GenerationRequest, ResumeRule
from flotilla.services.rollout.engines.decoders.arrival import Arrival
from flotilla.services.rollout.engines.decoders.native import kernels
from flotilla.services.rollout.engines.embedded.engine import TorchEngine
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from tests.contract.engine.models import VOCAB, make_model, save_image, save_model
from tests.contract.engine.requests import a_request
from tests.integration.engine.running import Answers, answer, steps
from tests.pairs.covering import Row, covering_rows
from tests.pairs.documents import changes_of
from tests.pairs.reading import COARSE, EXACT, Reading, prefix_of
from tests.pairs.table import ENGINE, ENGINE_REFUSED, ENGINE_STATES

ROWS = covering_rows(
    {name: list(values) for name, values in ENGINE.items()}, ENGINE_STATES.values(), list(ENGINE_REFUSED)
)
DEFAULTS: Row = {name: next(iter(values)) for name, values in ENGINE.items()}
FIRST, SECOND, THIRD = 3, 5, 6
"""The version that an engine starts with, and those of the updates in the first and in the second turn."""
SEEDS = (11, 2**62 + 5, 77, 3, 1234567)
PROMPT = tuple(range(20, 41))
"""Longer than what a kept beginning has at least."""
NEW_TOKENS = 22
STEPS_BEFORE = 6
BEGUN_TOKENS = 4


def told(row: Row) -> str:
    """Name a row by what is not as usual."""
    return ", ".join(f"{name} {value}" for name, value in row.items() if value != DEFAULTS[name]) or "as usual"


def part(row: Row, prefix: str) -> dict[str, Any]:
    """Pick the fields of settings, request or sampling that a row sets."""
    changes = changes_of(row, ENGINE)
    return {key.removeprefix(f"{prefix}."): value for key, value in changes.items() if key.startswith(f"{prefix}.")}


class Case:
    """What one row has: its models, their images, and engines over the first of them."""

    def __init__(self, row: Row, folder: Path) -> None:
        self.row, self.changes = row, changes_of(row, ENGINE)
        family = self.changes["model"]
        self.path = folder / "model"
        save_model(family, self.path)
        words = {f"w{number}": number for number in range(VOCAB)}
        Tokenizer(WordLevel(words, unk_token="w0")).save(str(self.path / "tokenizer.json"))
        dtype = getattr(torch, part(row, "engine").get("dtype", "float32"))
        # As trainers send them: the sums of float32 weights that an engine has rounded differ.
        made = {version: make_model(family, seed=seed) for version, seed in ((FIRST, 0), (SECOND, 1), (THIRD, 2))}
        self.models: dict[int, nn.Module] = {version: model.to(dtype) for version, model in made.items()}
        self.images = {
            version: save_image(self.models[version], folder / f"{version}.safetensors") for version in (SECOND, THIRD)
        }
        self.reading = Reading(
            self.models, self.changes.get("update") == "continue", EXACT if dtype is torch.float32 else COARSE
        )

    def engine(self, **changes: Any) -> TorchEngine:
        usual = {"version": FIRST, "slots": 12, "context_tokens": 128}
        settings = EngineSettings(str(self.path), **{**usual, **part(self.row, "engine"), **changes})
        return TorchEngine(settings, goes_ahead=self.changes.get("goes_ahead", False))

    def request(self, prompt_ids: Sequence[int], seeds: Sequence[int], **changes: Any) -> GenerationRequest:
        sampling = {"max_new_tokens": NEW_TOKENS, **part(self.row, "sampling")}
        return a_request(prompt_ids, seeds, is_turn=True, **{**part(self.row, "request"), **sampling, **changes})

    def begun(self, request: GenerationRequest) -> GenerationRequest:
        """Give a request the tokens that an engine of an earlier version has sampled of it, where the row has it so."""
        if "max_lag" not in self.changes:
            return request
        sampled = answer(self.engine(version=0), replace(request, request_id="before"))
        rule = ResumeRule(mixes_versions=True, max_lag=self.changes["max_lag"])
        return replace(request, prefixes=tuple(prefix_of(each, BEGUN_TOKENS) for each in sampled), resume=rule)

    def sampled(self, engine: TorchEngine, requests: Sequence[GenerationRequest], version: int) -> Answers:
        """Have requests answered, the later ones beside the first, over an update where the row has one."""
        answers: Answers = {}
        for request in requests:
            engine.submit(request)
            answers |= steps(engine, STEPS_BEFORE // 2)
        if "update" in self.changes:
            image = self.images[version]
            arrival = Arrival(image, version)
            if self.row["images"] == "as they arrive":
                engine.begin_transfer(arrival)
                arrival.advance(image.stat().st_size)
                arrival.complete()
                engine.complete_transfer(arrival)
            engine.request_update(version, image, version, OnWeightUpdate(self.changes["update"]))
        return answers | steps(engine)


def neighbour(number: int) -> GenerationRequest:
    """Make a request of another kind, whose rows lie between the others."""
    return a_request(PROMPT[: 5 + number], (50 + number, 60 + number), max_new_tokens=9)


def versions_of(completions: Sequence[Completion]) -> set[int]:
    return {version for each in completions for _, version in each.versions}


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_what_an_engine_samples_is_what_a_naive_reading_has(
    row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(told(row))
    case = Case(row, tmp_path)
    if "kernels" in case.changes:
        monkeypatch.setattr(kernels, "_kernels", lambda: None)
    engine = case.engine()
    beside = [neighbour(0), neighbour(1)]
    first = case.begun(case.request(PROMPT, SEEDS))

    answers = case.sampled(engine, [first, *beside], SECOND)
    said = answers[first.request_id]
    longest = max(said, key=lambda each: each.token_ids.size)
    second = case.request((*PROMPT, *longest.token_ids.tolist(), 41, 42), SEEDS[:3], max_new_tokens=16)
    more = replace(neighbour(2), request_id="another")
    answers |= case.sampled(engine, [more, second], THIRD)

    for request in (first, *beside, second, more):
        for index, completion in enumerate(answers[request.request_id]):
            case.reading.check(request, index, completion)
    load = engine.load()
    assert (load.running, load.waiting) == (0, 0)
    assert load.version == (THIRD if "update" in case.changes else FIRST)
    has_met(case, engine, said, answers[second.request_id])


def has_met(case: Case, engine: TorchEngine, said: Sequence[Completion], again: Sequence[Completion]) -> None:
    """Check that the row's values had something to do, where no other value forbids it."""
    row = case.row
    assert (max(each.num_resumed for each in said) > 0) == (row["beginning"] == "with tokens")
    if row["kept turns"] == "none":
        assert engine.load().reuses == 0
    elif all(row[name] == DEFAULTS[name] for name in ("dtype", "bits", "weights")) and may_reuse(row):
        assert engine.load().reuses > 0
    several = [len(versions_of([each]) - {0}) for each in [*said, *again]]
    if row["update"] in {"none", "drain"} or row["weights"] == "held":
        assert set(several) == {1}
    elif row["end"] == "length":
        assert 2 in several
    if row["end"] == "length":
        assert {each.token_ids.size for each in said} == {NEW_TOKENS}
    elif row["end"] != "the model's" and row["choice"] != "greedy":
        assert any(each.token_ids.size < NEW_TOKENS for each in said)


def may_reuse(row: Row) -> bool:
    """Whether a model keeps keys and values of the first turn, by the version that begins the second."""
    return row["model"] in {"fused", "tied"} and row["update"] in {"none", "interrupt"} and row["end"] == "length"


def bits_of(completions: Sequence[Completion]) -> list[tuple[bytes, bytes]]:
    return [(each.token_ids.tobytes(), each.log_probs.tobytes()) for each in completions]


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row["bits"] == "of no batch" and row["update"] in {"none", "drain"}], ids=told
)
def test_bits_are_those_of_a_request_that_is_alone(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(row, tmp_path)
    if "kernels" in case.changes:
        monkeypatch.setattr(kernels, "_kernels", lambda: None)
    request = case.begun(case.request(PROMPT, SEEDS))
    engine = case.engine()

    crowded = case.sampled(engine, [request, neighbour(0), neighbour(1)], SECOND)[request.request_id]

    alone = answer(case.engine(), replace(request, request_id="alone"))
    same = [
        pair
        for pair in zip(bits_of(crowded), bits_of(alone), crowded, strict=True)
        if versions_of([pair[2]]) <= {0, FIRST}
    ]
    assert same
    assert all(one == other for one, other, _ in same)


def test_rows_meet_every_pair_and_are_few() -> None:
    assert 15 <= len(ROWS) <= 30
    assert cast("set[str]", {row["update"] for row in ROWS}) == set(ENGINE["update"])
