"""What trainer and sampler do with requests when something fails, or another process takes over."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.rollout.tinker.worker import SamplingWorker
from flotilla.services.trainer.tinker.trainer import Written
from flotilla.services.trainer.tinker.worker import TrainingWorker
from flotilla.shared.errors import ClaimLost, NotFound, Unavailable, WorkerDied
from flotilla.shared.tinker.queue import Answer, Form, Request, Work
from flotilla.shared.tinker.records import Chunk, Model, Prompt, Sample, Sampler, Save, Saved, Verb
from flotilla.shared.tinker.sessions import Gap

MODEL = Model(model_id="s:train:0", session_id="s", owner="me")
PROMPT = Prompt(chunks=[Chunk(tokens=[1, 2])])

MOST_ROUNDS = 100


class AllDone(Exception):
    """Nothing waits any more."""


class MemoryQueue:
    """As much of the queue as workers need, in memory."""

    def __init__(self, work: Work, requests: list[Request]) -> None:
        self.work, self.requests = work, requests
        self.answers: dict[str, Answer] = {}
        self.forgotten: list[tuple[int, int]] = []
        self.samplers: dict[str, Sampler] = {}
        self.snapshots: dict[str, str] = {}
        self.closed: set[str] = set()
        self.attempts = Counter[str]()
        self.missing: list[Gap] = []
        self.skipped: list[int] = []
        self.given_up: list[str] = []
        self.is_replaced = False
        self.rounds = 0
        # How often Redis is away when an answer comes.
        self.away = 0

    async def begin(self, work: Work) -> str:
        """Become the process that answers."""
        return "1"

    async def owners(self, work: Work) -> list[str]:
        """Name who waits."""
        self.rounds += 1
        assert self.rounds < MOST_ROUNDS
        left = sorted({each.owner for each in self.requests if each.id not in self.answers})
        if work is not self.work:
            return []
        if not left:
            raise AllDone
        return left

    async def waiting(self, work: Work, owner: str, after: str, count: int) -> list[Request]:
        """Return what was not answered."""
        left = [each for each in self.requests if each.owner == owner and each.id not in self.answers]
        return [each for each in left if after == "0" or int(each.entry) > int(after)][:count]

    async def hears(self, work: Work, heard: str) -> str:
        """Hear of nothing new."""
        await asyncio.sleep(0.005)
        return heard

    async def is_closed(self, model_id: str) -> bool:
        """Return whether the model's session ended."""
        return model_id in self.closed

    async def is_latest(self, work: Work, incarnation: str) -> bool:
        """Nobody else works."""
        return True

    async def model(self, model_id: str) -> Model | None:
        """Find a model."""
        return MODEL

    async def sampler(self, sampler_id: str) -> Sampler | None:
        """Find a sampling session."""
        return self.samplers.get(sampler_id)

    async def inflight(self, model_id: str) -> str | None:
        """Return from what sampling sessions in flight sample."""
        return self.snapshots.get(model_id)

    async def gaps(self) -> list[Gap]:
        """List what waits for an earlier request."""
        return self.missing

    async def skip(self, model_id: str, gap: int, last: int) -> bool:
        """Go on behind what was lost."""
        self.skipped.append(last)
        return True

    async def give_up(self, model_id: str, why: str) -> None:
        """Say that it is lost."""
        self.given_up.append(why)

    async def progress(self, model_id: str) -> int:
        """Return the last place that was answered."""
        return max((each.seq for each in self.requests if each.id in self.answers), default=-1)

    async def past(self, model_id: str, first: int, last: int) -> AsyncIterator[Request]:
        """Yield requests again."""
        for each in self.requests:
            if first <= each.seq <= last:
                failed = each.id in self.answers and self.answers[each.id].form is Form.FAILED
                yield replace(each, failed="user") if failed else each

    async def attempt(self, request: Request, work: Work) -> int:
        """Count how often it was begun."""
        self.attempts[request.id] += 1
        return self.attempts[request.id]

    async def reply(self, work: Work, incarnation: str, request: Request, answer: Answer, made: Any = None) -> None:
        """Answer."""
        if self.away > 0:
            self.away -= 1
            raise Unavailable("Redis is away")
        if self.is_replaced:
            raise ClaimLost("another process")
        self.answers[request.id] = answer
        if made is not None and made.inflight:
            self.snapshots[request.model_id] = made.inflight

    async def forget_bodies(self, model_id: str, first: int, last: int) -> None:
        """Note what was let go."""
        self.forgotten.append((first, last))


class NotingTrainer:
    """Notes what it is to do; a load is refused while there is nothing to load."""

    def __init__(self, *, has_saved: bool = False) -> None:
        self.done: list[str] = []
        self.is_there = False
        self.scored: list[str | None] = []
        self.dropped: list[str] = []
        self.has_saved = has_saved
        self.last = -1
        self.went_back: list[int] = []

    def knows(self, model_id: str) -> bool:
        """Return whether a model is there."""
        return self.is_there

    def reached(self, model_id: str) -> int:
        """Return the last request that was done."""
        return self.last

    def go_back(self, model_id: str, seq: int) -> None:
        """Drop what has a request."""
        self.went_back.append(seq)
        self.is_there, self.last = False, -1

    def write(self, model_id: str) -> None:
        """Write the state."""
        self.done.append("write")

    def restore(self, model: Model, before: int) -> int:
        """Find nothing on the disk."""
        return -1

    def do(self, request: Request, model: Model) -> Answer:
        """Note a request."""
        if request.verb == Verb.LOAD and not self.has_saved:
            raise NotFound("there is no saved model of this name")
        self.done.append(request.verb)
        self.is_there, self.last = True, request.seq
        return Answer.json({})

    def forget(self, model_id: str) -> None:
        """Drop the model."""
        self.is_there, self.last = False, -1

    def unused(self) -> str | None:
        """There is room."""
        return None

    def models(self) -> list[str]:
        """List those that are there."""
        return [MODEL.model_id] if self.is_there else []

    def discard(self, model_id: str) -> None:
        """Drop the model and its state."""
        self.forget(model_id)

    def drop_snapshot(self, path: str) -> None:
        """Note what nobody samples from."""
        self.dropped.append(path)

    def write_what_is_due(self, model_id: str, verb: str) -> Written | None:
        """Write the state behind a load."""
        return Written(model_id, 0, 0) if verb == Verb.LOAD else None

    def score(self, path: str | None, token_ids: Any, count: int) -> Any:
        """Note from what it is scored."""
        self.scored.append(path)
        raise NotFound("no such weights")


def requests(*verbs: Verb) -> list[Request]:
    return [Request(f"r{seq}", str(seq), verb, seq, MODEL.model_id, b"x") for seq, verb in enumerate(verbs)]


def trained(queue: MemoryQueue, trainer: NotingTrainer) -> None:
    with pytest.raises(AllDone):
        asyncio.run(TrainingWorker(queue, queue, trainer).run())  # type: ignore[arg-type]


def test_a_load_that_is_refused_writes_no_state_without_the_gradients() -> None:
    queue = MemoryQueue(Work.TRAIN, requests(Verb.CREATE, Verb.FORWARD_BACKWARD, Verb.LOAD))

    trained(queue, NotingTrainer())

    assert queue.answers["r2"].form is Form.FAILED
    assert queue.forgotten == []


def test_what_was_refused_is_not_loaded_by_the_process_that_takes_over() -> None:
    queue = MemoryQueue(Work.TRAIN, requests(Verb.CREATE, Verb.LOAD))
    trained(queue, NotingTrainer())
    queue.requests += [Request("r2", "2", Verb.FORWARD_BACKWARD, 2, MODEL.model_id, b"x")]
    other = NotingTrainer(has_saved=True)

    trained(queue, other)

    assert other.done == [Verb.CREATE, Verb.FORWARD_BACKWARD]


def test_a_model_that_was_done_again_by_half_is_not_gone_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla.services.trainer.tinker.worker.AWAY_SECONDS", 0.0)
    queue = MemoryQueue(Work.TRAIN, requests(Verb.CREATE, Verb.FORWARD_BACKWARD, Verb.OPTIM_STEP))
    queue.answers |= {"r0": Answer.json({}), "r1": Answer.json({})}
    whole = queue.past

    async def broken_off(model_id: str, first: int, last: int) -> AsyncIterator[Request]:
        yield queue.requests[0]
        monkeypatch.setattr(queue, "past", whole)
        raise Unavailable("Redis is away")

    monkeypatch.setattr(queue, "past", broken_off)
    trainer = NotingTrainer()

    trained(queue, trainer)

    assert trainer.done == [Verb.CREATE, Verb.CREATE, Verb.FORWARD_BACKWARD, Verb.OPTIM_STEP]


def test_a_model_whose_requests_are_gone_is_not_gone_on_from() -> None:
    queue = MemoryQueue(Work.TRAIN, requests(Verb.CREATE, Verb.FORWARD_BACKWARD, Verb.OPTIM_STEP))
    queue.requests[1] = replace(queue.requests[1], body=b"")
    queue.answers |= {"r0": Answer.json({}), "r1": Answer.json({})}
    trainer = NotingTrainer()

    trained(queue, trainer)

    assert queue.answers["r2"].form is Form.FAILED
    assert b"older than what is kept" in queue.answers["r2"].content
    assert not trainer.is_there


@pytest.mark.parametrize("work", [Work.TRAIN, Work.SCORE])
def test_a_request_that_ended_the_process_three_times_is_answered(work: Work) -> None:
    body = Sample(prompt=PROMPT).model_dump_json().encode()
    queue = MemoryQueue(work, [Request("r0", "0", Verb.CREATE, 0, MODEL.model_id, body)])
    queue.attempts["r0"] = 3
    trainer = NotingTrainer()

    trained(queue, trainer)

    assert b"ended 3 times" in queue.answers["r0"].content
    assert (trainer.done, trainer.scored) == ([], [])


def test_a_state_that_cannot_be_written_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = MemoryQueue(Work.TRAIN, requests(Verb.CREATE, Verb.OPTIM_STEP))
    trainer = NotingTrainer()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer, "write_what_is_due", full)
    trained(queue, trainer)

    assert queue.answers["r1"].form is Form.JSON
    assert queue.forgotten == []


def test_what_is_scored_is_what_the_sampling_session_samples_from() -> None:
    wanted = Sample(prompt=PROMPT, sampling_session_id="q", path="tinker://r:train:0/sampler_weights/theirs")
    queue = MemoryQueue(Work.SCORE, [Request("r0", "0", "", 0, "", wanted.model_dump_json().encode())])
    queue.samplers["q"] = Sampler(session_id="s", owner="me", path="tinker://s:train:0/sampler_weights/own")
    trainer = NotingTrainer()

    trained(queue, trainer)

    assert trainer.scored == ["tinker://s:train:0/sampler_weights/own"]


@pytest.mark.parametrize(
    ("kind", "is_sampled"),
    [("sampler_weights", True), ("ephemeral", True), ("weights", False), ("external_weights", False)],
)
def test_scores_are_of_what_is_saved_to_be_sampled_from(kind: str, is_sampled: bool) -> None:
    path = f"tinker://s:train:0/{kind}/000001"
    queue = MemoryQueue(
        Work.SCORE, [Request("r0", "0", "", 0, "", Sample(prompt=PROMPT, path=path).model_dump_json().encode())]
    )
    trainer = NotingTrainer()

    trained(queue, trainer)

    assert trainer.scored == ([path] if is_sampled else [])
    assert (b"is not to be sampled from" in queue.answers["r0"].content) is not is_sampled


def test_owners_take_turns_at_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = [replace(each, owner="a") for each in requests(*[Verb.CREATE] * 4)]
    theirs = [Request(f"t{seq}", str(seq), Verb.CREATE, seq, "t:train:0", b"x", "b") for seq in range(2)]
    queue = MemoryQueue(Work.TRAIN, [*mine, *theirs])
    clock = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))

    trained(queue, NotingTrainer())

    assert list(queue.answers) == ["r0", "t0", "r1", "t1", "r2", "r3"]


def test_a_model_whose_session_ended_computes_nothing_and_is_answered() -> None:
    queue = MemoryQueue(Work.TRAIN, requests(Verb.CREATE))
    queue.closed.add(MODEL.model_id)
    trainer = NotingTrainer()

    trained(queue, trainer)

    assert b"its session ended" in queue.answers["r0"].content
    assert trainer.done == []


def test_a_snapshot_in_flight_is_dropped_once_a_newer_one_is_sampled_from() -> None:
    saves = [
        Save(path=f"tinker://s:train:0/ephemeral/{name}", sampling_session_id=f"s:sample:{name}", is_inflight=True)
        for name in ("1", "2")
    ]
    queue = MemoryQueue(Work.TRAIN, requests(Verb.CREATE, *[Verb.SAVE_FOR_SAMPLER] * 2))
    for seq, save in enumerate(saves, 1):
        queue.requests[seq] = replace(queue.requests[seq], body=save.model_dump_json().encode())
    trainer = NotingTrainer()

    trained(queue, trainer)

    assert trainer.dropped == [saves[0].path]


def test_a_request_that_the_model_has_already_is_done_again_from_before_and_not_on_top() -> None:
    queue = MemoryQueue(Work.TRAIN, requests(Verb.CREATE, Verb.FORWARD_BACKWARD, Verb.OPTIM_STEP))
    trainer = NotingTrainer()
    trained(queue, trainer)

    # Redis comes back older than the second answer.
    del queue.answers["r1"], queue.answers["r2"]
    trained(queue, trainer)

    assert trainer.went_back == [1]
    assert trainer.done[3:] == [Verb.CREATE, Verb.FORWARD_BACKWARD, Verb.OPTIM_STEP]


def test_an_answer_that_redis_did_not_take_is_given_again_without_doing_the_request_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flotilla.shared.tinker.store.AWAY_SECONDS", 0.0)
    queue = MemoryQueue(Work.TRAIN, requests(Verb.CREATE))
    queue.away = 5
    trainer = NotingTrainer()

    trained(queue, trainer)

    assert trainer.done == [Verb.CREATE]
    assert queue.answers["r0"].form is Form.JSON


@pytest.mark.parametrize("work", [Work.TRAIN, Work.SCORE])
def test_while_redis_is_away_no_request_fails_and_none_counts_as_an_end_of_the_process(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flotilla.services.trainer.tinker.worker.AWAY_SECONDS", 0.0)
    away = iter([Unavailable("Redis is away")] * 5)

    async def absent(*_: Any) -> Any:
        if (error := next(away, None)) is not None:
            raise error
        return MODEL if work is Work.TRAIN else Sampler(session_id="s", owner="me")

    body = Sample(prompt=PROMPT, sampling_session_id="q").model_dump_json().encode()
    queue = MemoryQueue(work, [Request("r0", "0", Verb.CREATE, 0, MODEL.model_id, body)])
    monkeypatch.setattr(queue, "model" if work is Work.TRAIN else "sampler", absent)
    trainer = NotingTrainer()

    trained(queue, trainer)

    assert next(away, None) is None
    assert queue.attempts == {"r0": 1}
    assert (trainer.done, trainer.scored) == (([Verb.CREATE], []) if work is Work.TRAIN else ([], [None]))


@pytest.mark.parametrize(
    ("reached", "seconds", "skipped", "num_given_up"),
    [(6, 31.0, [6], 0), (6, 5.0, [], 0), (5, 31.0, [], 1), (3, 31.0, [], 0), (3, 331.0, [], 1)],
)
def test_behind_lost_requests_the_model_goes_on_where_they_were_done_and_is_given_up_where_not(
    reached: int, seconds: float, skipped: list[int], num_given_up: int
) -> None:
    queue = MemoryQueue(Work.TRAIN, [])
    queue.missing = [Gap(MODEL.model_id, 5, 7, seconds)]
    trainer = NotingTrainer()
    trainer.last = reached

    trained(queue, trainer)

    assert (queue.skipped, len(queue.given_up)) == (skipped, num_given_up)
    assert trainer.done == (["write"] if skipped else [])
    assert all("request 5" in why for why in queue.given_up)


def test_a_process_that_was_replaced_says_of_no_snapshot_that_it_is_sampled_from() -> None:
    save = Save(path="tinker://s:train:0/ephemeral/1", sampling_session_id="s:sample:1", is_inflight=True)
    queue = MemoryQueue(Work.TRAIN, requests(Verb.SAVE_FOR_SAMPLER))
    queue.requests[0] = replace(queue.requests[0], body=save.model_dump_json().encode())
    queue.is_replaced = True

    with pytest.raises(ClaimLost):
        asyncio.run(TrainingWorker(queue, queue, NotingTrainer()).run())  # type: ignore[arg-type]

    assert queue.snapshots == {}


def a_manifest(directory: Path) -> Saved:
    """Read what a model is that trains whole."""
    return Saved(path=directory.name, owner="me", created=0.0, step=1, num_bytes=1)


class NotingEngine:
    """Samples nothing; ends while it does one request."""

    def __init__(self, *, ends_in: str = "") -> None:
        self.ends_in = ends_in
        self.loaded: list[bytes] = []

    async def generate(self, request: Any) -> Any:
        """Sample a while."""
        await asyncio.sleep(0.01)
        if request.request_id == self.ends_in:
            raise WorkerDied("the engine ended")
        return []

    async def load_weights(self, image: Path, version: int, mode: Any) -> None:
        """Note what is loaded."""
        self.loaded.append(image.read_bytes())


def samples(count: int, **source: Any) -> list[Request]:
    body = Sample(prompt=PROMPT, **source).model_dump_json().encode()
    return [Request(f"r{number}", str(number + 1), "", 0, "", body) for number in range(count)]


def sampled(queue: Any, engine: Any, ends: type[Exception] = AllDone) -> None:
    with pytest.raises(ends):
        asyncio.run(SamplingWorker(queue, queue, engine, Path("/nowhere"), Path("/nowhere"), 64).run())


def test_a_sampler_whose_engine_died_ends_and_leaves_what_waits_to_the_next() -> None:
    queue = MemoryQueue(Work.SAMPLE, samples(1))

    sampled(queue, NotingEngine(ends_in="r0"), WorkerDied)

    assert queue.answers == {}


def test_a_request_that_ends_the_engine_is_refused_after_three_times_and_holds_up_nobody() -> None:
    queue = MemoryQueue(Work.SAMPLE, samples(4))

    for _ in range(3):
        sampled(queue, NotingEngine(ends_in="r1"), WorkerDied)
    sampled(queue, NotingEngine(ends_in="r1"))

    assert b"ended 3 times" in queue.answers.pop("r1").content
    assert {each.form for each in queue.answers.values()} == {Form.PROTOBUF}
    assert len(queue.answers) == 3


@pytest.mark.parametrize("where", ["sampler", "reply"])
def test_while_redis_is_away_no_sample_fails(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("rollout.tinker.worker", "shared.tinker.store"):
        place = module if module.startswith("shared") else f"services.{module}"
        monkeypatch.setattr(f"flotilla.{place}.AWAY_SECONDS", 0.0)
    away = iter([Unavailable("Redis is away")] * 3)

    async def absent(*_: Any) -> Any:
        if (error := next(away, None)) is not None:
            raise error
        return Sampler(session_id="s", owner="me")

    queue = MemoryQueue(Work.SAMPLE, samples(2, sampling_session_id="q"))
    queue.away = 3 if where == "reply" else 0
    monkeypatch.setattr(queue, "sampler", absent)

    sampled(queue, NotingEngine())

    assert {name: each.form for name, each in queue.answers.items()} == {"r0": Form.PROTOBUF, "r1": Form.PROTOBUF}
    assert queue.attempts == {"r0": 1, "r1": 1}


def test_a_full_disk_holds_up_those_alone_whose_weights_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla.services.rollout.tinker.worker.AWAY_SECONDS", 0.05)
    full = iter([Unavailable("No space left on device")] * 4)

    def write(base: Path, saved: Path | None, image: Path) -> int:
        if (error := next(full, None)) is not None:
            raise error
        image.write_bytes(b"weights")
        return 1

    monkeypatch.setattr("flotilla.services.rollout.tinker.serving.write_image", write)
    theirs = samples(1, path="tinker://s:train:0/sampler_weights/a")[0]
    monkeypatch.setattr("flotilla.services.rollout.tinker.serving.read_manifest", a_manifest)
    queue = MemoryQueue(Work.SAMPLE, [replace(theirs, owner="a"), replace(samples(2)[1], owner="b")])
    engine = NotingEngine()

    sampled(queue, engine)

    assert list(queue.answers) == ["r1", "r0"]
    assert engine.loaded == [b"weights"]


def test_weights_that_were_replaced_while_they_were_read_are_sampled_from_as_they_are_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[str] = []

    def write(base: Path, saved: Path | None, image: Path) -> int:
        assert saved is not None
        read.append(saved.name)
        queue.snapshots[MODEL.model_id] = "tinker://s:train:0/ephemeral/2"
        if saved.name == "1":
            raise NotFound("it was replaced")
        image.write_bytes(b"weights")
        return 1

    monkeypatch.setattr("flotilla.services.rollout.tinker.serving.write_image", write)
    monkeypatch.setattr("flotilla.services.rollout.tinker.serving.read_manifest", a_manifest)
    queue = MemoryQueue(Work.SAMPLE, samples(1, sampling_session_id="q"))
    queue.samplers["q"] = Sampler(session_id="s", owner="me", inflight_of=MODEL.model_id)
    queue.snapshots[MODEL.model_id] = "tinker://s:train:0/ephemeral/1"

    sampled(queue, NotingEngine())

    assert read == ["1", "2"]
    assert queue.answers["r0"].form is Form.PROTOBUF
