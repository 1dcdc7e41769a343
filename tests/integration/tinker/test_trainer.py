"""The trainer of the Tinker API on a real model: models apart from each other, and one process that takes over."""

import errno
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError

from flotilla.services.trainer.tinker import files
from flotilla.services.trainer.tinker.slots import Base, micro_batches
from flotilla.services.trainer.tinker.trainer import Trainer, Written
from flotilla.shared.clock import ManualClock
from flotilla.shared.errors import FlotillaError, InvalidRequest, NotFound, QuotaExceeded
from flotilla.shared.tinker.messages import (
    as_bytes,
    as_double,
    entry_of,
    fields_of,
    put_bytes,
    put_entry,
    put_int,
    put_ints,
)
from flotilla.shared.tinker.paths import Kind
from flotilla.shared.tinker.queue import Answer, Form, Request
from flotilla.shared.tinker.records import AdamStep, Load, Lora, Model, Save, Verb
from flotilla.shared.tinker.store import request_id_of
from tests.fleet import tiny_model

ROWS = ([5, 6, 7, 8, 9], [9, 30, 31])


@pytest.fixture(scope="module")
def base() -> Iterator[Base]:
    yield Base(tiny_model(), device="cpu", dtype="float32")


def tensor(values: Sequence[float], dtype: int) -> bytes:
    kind = "<f4" if dtype == 1 else "<i8"
    raw = np.array(values, kind).tobytes()
    return put_bytes(1, raw) + put_int(3, dtype) + put_ints(4, [len(values)])


def a_pass(loss: str = "cross_entropy", rows: Sequence[Sequence[int]] = ROWS, **inputs: Sequence[float]) -> bytes:
    data = []
    for row in rows:
        text = put_bytes(1, put_bytes(1, put_bytes(1, np.array(row[:-1], "<i4").tobytes())))
        given = {name: put_bytes(2, tensor([*each][: len(row) - 1], 1)) for name, each in inputs.items()}
        given["target_tokens"] = put_bytes(2, tensor(row[1:], 2))
        data.append(put_bytes(3, text + b"".join(put_entry(2, name, each) for name, each in given.items())))
    return put_bytes(4, loss.encode()) + b"".join(data)


def loss_of(answer: Answer) -> float:
    assert answer.form is Form.PROTOBUF
    for number, value in fields_of(memoryview(answer.content)):
        if number == 3:
            return as_double(entry_of(value)[1])
    raise AssertionError("no metrics")


class Client:
    """Numbers a model's requests, as the client does."""

    def __init__(self, trainer: Trainer, number: int, lora: Lora | None = None, owner: str = "me") -> None:
        self.trainer, self.seq = trainer, -1
        run = f"s:train:{number}"
        self.model = Model(model_id=run, session_id="s", owner=owner, lora=lora)

    def asks(self, verb: Verb, body: bytes = b"") -> Answer:
        self.seq += 1
        run = self.model.model_id
        return self.trainer.do(Request(request_id_of(run, self.seq), "", verb, self.seq, run, body), self.model)

    def passes(self, body: bytes | None = None) -> float:
        return loss_of(self.asks(Verb.FORWARD_BACKWARD, body or a_pass()))

    def updates(self, **how: float) -> None:
        step = AdamStep.model_validate({"learning_rate": 1e-2, **how})
        self.asks(Verb.OPTIM_STEP, step.model_dump_json().encode())
        self.trainer.write_what_is_due(self.model.model_id, Verb.OPTIM_STEP)

    def learns(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            losses.append(self.passes())
            self.updates()
        return losses


def a_trainer(base: Base, data: Path) -> Trainer:
    return Trainer(base, "tiny", data, ManualClock())


def made(base: Base, data: Path, number: int = 0, lora: Lora | None = Lora(rank=4, seed=1)) -> Client:  # noqa: B008
    client = Client(a_trainer(base, data), number, lora)
    client.asks(Verb.CREATE)
    return client


@pytest.mark.parametrize("lora", [Lora(rank=4, seed=1), Lora(rank=2, train_mlp=False), None])
def test_a_model_learns_and_the_base_stays(base: Base, tmp_path: Path, lora: Lora | None) -> None:
    before = base_scores(base, tmp_path)
    losses = made(base, tmp_path, lora=lora).learns(6)

    assert losses[-1] < 0.7 * losses[0]
    assert base_scores(base, tmp_path) == before


def base_scores(base: Base, data: Path) -> list[float]:
    found: list[float] = a_trainer(base, data).score(None, ROWS[0], 0)[0].tolist()
    return found


def test_models_of_different_ranks_take_turns_and_do_not_touch_each_other(base: Base, tmp_path: Path) -> None:
    kinds: Mapping[int, Lora | None] = {0: Lora(rank=1, seed=1), 1: Lora(rank=16, seed=2, train_attn=False), 2: None}
    alone = {number: made(base, tmp_path / str(number), number, lora).learns(4) for number, lora in kinds.items()}
    trainer = a_trainer(base, tmp_path / "together")
    clients = [Client(trainer, number, lora) for number, lora in kinds.items()]
    for client in clients:
        client.asks(Verb.CREATE)

    together: dict[int, list[float]] = {number: [] for number in kinds}
    for _ in range(4):
        for number, client in enumerate(clients):
            together[number].append(client.passes())
        for client in clients:
            client.updates()

    assert together == alone


@pytest.mark.parametrize("lora", [Lora(rank=4, seed=1), None])
def test_a_trainer_that_takes_over_comes_to_the_same_bits(base: Base, tmp_path: Path, lora: Lora | None) -> None:
    expected = made(base, tmp_path / "quiet", lora=lora).learns(14)
    client = made(base, tmp_path / "killed", lora=lora)
    losses = client.learns(11)
    half = client.passes()

    other = a_trainer(base, tmp_path / "killed")
    on_disk = other.restore(client.model, client.seq + 1)
    client.trainer = other
    # The queue has the later requests: three updates, and half of one.
    passed = client.seq
    client.seq = on_disk
    for _ in range(3):
        client.passes()
        client.updates()
    assert client.passes() == half
    assert client.seq == passed
    client.updates()

    assert on_disk == 16
    assert [*losses, half, *client.learns(2)] == expected


def test_a_request_that_fails_leaves_nothing_in_the_next_update(base: Base, tmp_path: Path) -> None:
    expected = made(base, tmp_path / "right").learns(3)
    client = made(base, tmp_path / "wrong")

    found = []
    for _ in range(3):
        found.append(client.passes())
        for wrong in (a_pass("nonsense"), a_pass("ppo"), a_pass(rows=[[5, 6], [7, 100_000]])):
            with pytest.raises(InvalidRequest):
                client.passes(wrong)
        client.updates()

    assert found == expected


def test_a_gradient_that_is_not_finite_updates_nothing_and_is_forgotten(base: Base, tmp_path: Path) -> None:
    client = made(base, tmp_path)
    before = client.passes(put_int(6, 1) + a_pass())

    client.passes(a_pass(weights=[float("inf")] * 4))
    with pytest.raises(InvalidRequest, match="not finite"):
        client.updates()

    client.updates()
    assert client.passes() == before


def test_forward_alone_adds_no_gradient(base: Base, tmp_path: Path) -> None:
    client = made(base, tmp_path)

    losses = [client.passes(a_pass() + put_int(6, 1)) for _ in range(2)]
    client.updates()

    assert losses[0] == losses[1] == client.passes()


def test_what_is_saved_goes_on_with_the_optimiser_and_begins_anew_without(base: Base, tmp_path: Path) -> None:
    client = made(base, tmp_path)
    client.learns(3)
    path = f"tinker://{client.model.model_id}/weights/a"
    client.asks(Verb.SAVE, Save(path=path).model_dump_json().encode())
    others = [Client(client.trainer, number, client.model.lora) for number in (1, 2)]
    for other, optimizer in zip(others, (True, False), strict=True):
        other.asks(Verb.LOAD, Load(path=path, optimizer=optimizer).model_dump_json().encode())

    expected, exact, anew = (each.learns(3) for each in (client, *others))

    assert exact == expected
    assert anew[0] == expected[0]
    assert anew[1:] != expected[1:]


def test_nobody_loads_what_is_another_tokens_own(base: Base, tmp_path: Path) -> None:
    client = made(base, tmp_path)
    path = f"tinker://{client.model.model_id}/weights/a"
    client.asks(Verb.SAVE, Save(path=path).model_dump_json().encode())

    with pytest.raises(NotFound):
        Client(client.trainer, 1, client.model.lora, owner="other").asks(
            Verb.LOAD, Load(path=path).model_dump_json().encode()
        )


def test_a_name_is_not_overwritten_unless_that_is_asked_for(base: Base, tmp_path: Path) -> None:
    client = made(base, tmp_path)
    save = Save(path=f"tinker://{client.model.model_id}/weights/a")
    client.asks(Verb.SAVE, save.model_dump_json().encode())
    client.learns(1)

    with pytest.raises(InvalidRequest, match="is there already"):
        client.asks(Verb.SAVE, save.model_dump_json().encode())
    client.asks(Verb.SAVE, save.model_copy(update={"overwrite": True}).model_dump_json().encode())


@pytest.mark.parametrize(
    "refusal",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_the_answer_to_a_save_and_the_model_goes_on_as_if_nobody_had_asked(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    expected = made(base, tmp_path / "roomy").learns(2)
    client = made(base, tmp_path / "full")
    saves = [
        (verb, Save(path=f"tinker://s:train:0/{kind}/a", overwrite=True).model_dump_json().encode())
        for verb, kind in ((Verb.SAVE, Kind.TRAINING), (Verb.SAVE_FOR_SAMPLER, Kind.SAMPLER))
    ]
    losses = client.learns(1)
    client.asks(*saves[0])

    def full(*_: object) -> None:
        raise refusal

    with monkeypatch.context() as patched:
        patched.setattr(files, "save_file", full)
        for verb, body in saves:
            with pytest.raises(FlotillaError, match=r"a was not written.*: .*No space left on device") as caught:
                client.asks(verb, body)
            assert caught.value.status == 507
        with pytest.raises(FlotillaError, match="No space left"):
            client.trainer.unload("s:train:0")

    saved = tmp_path / "full/tinker/saved/s:train:0"
    # What was saved before is still there, nothing unfinished is, and it is saved when there is room.
    assert {kind.name: [each.name for each in kind.iterdir()] for kind in saved.iterdir()} == {
        Kind.TRAINING: ["a"],
        Kind.SAMPLER: [],
    }
    assert [*losses, *client.learns(1)] == expected
    for verb, body in saves:
        client.asks(verb, body)


def test_what_was_saved_before_is_put_back_where_the_new_one_cannot_take_its_place(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = made(base, tmp_path)
    save = Save(path="tinker://s:train:0/weights/a", overwrite=True).model_dump_json().encode()
    client.asks(Verb.SAVE, save)
    place = next(tmp_path.glob("**/weights/a"))
    before = {file.name: file.read_bytes() for file in place.iterdir()}
    client.learns(1)
    rename, refused = Path.rename, []

    def refuse_once(found: Path, target: Path) -> Path:
        if target == place and not refused:
            refused.append(found)
            raise OSError(errno.EIO, "Input/output error")
        return rename(found, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refuse_once)
        with pytest.raises(FlotillaError, match=r"what was there before stays: .*Input/output error"):
            client.asks(Verb.SAVE, save)

    assert refused
    assert {file.name: file.read_bytes() for file in place.iterdir()} == before


@pytest.mark.parametrize("name", ["../../escape", "a/b", ".hidden", ""])
def test_a_name_leads_nowhere_else(base: Base, tmp_path: Path, name: str) -> None:
    client = made(base, tmp_path)

    with pytest.raises(InvalidRequest):
        client.asks(Verb.SAVE, Save(path=f"tinker://{client.model.model_id}/weights/{name}").model_dump_json().encode())


def test_outputs_are_those_of_each_datum_in_its_place(base: Base, tmp_path: Path) -> None:
    client = made(base, tmp_path)

    found = client.asks(Verb.FORWARD_BACKWARD, a_pass(rows=[[5, 6, 7], [9, 30, 31, 32, 33], [5, 6]]))

    records = [as_bytes(value) for number, value in fields_of(memoryview(found.content)) if number == 2]
    sizes = []
    for record in records:
        for number, value in fields_of(record):
            if number == 2 and (entry := entry_of(value))[0] == "logprobs":
                (data,) = [as_bytes(each) for inner, each in fields_of(as_bytes(entry[1])) if inner == 1]
                sizes.append(len(data) // 4)
    assert sizes == [2, 4, 1]


def test_micro_batches_hold_every_sequence_once_within_their_size() -> None:
    lengths = [3, 90, 7, 30, 30, 1, 64]

    found = micro_batches(lengths, most=100)

    assert sorted(number for each in found for number in each) == list(range(7))
    assert all(len(each) * max(lengths[number] for number in each) <= 100 for each in found)


def test_a_model_that_left_memory_comes_back_with_its_half_of_an_update(base: Base, tmp_path: Path) -> None:
    expected = made(base, tmp_path / "stays").learns(3)
    client = made(base, tmp_path / "leaves")
    found = client.learns(1)
    found.append(client.passes())

    written = client.trainer.unload(client.model.model_id)
    assert not client.trainer.knows(client.model.model_id)
    assert client.trainer.restore(client.model, client.seq + 1) == client.seq
    client.updates()

    assert written == Written(client.model.model_id, 0, client.seq - 1)
    assert [*found, client.passes()] == expected


def test_as_many_models_as_there_is_room_for_are_in_memory_and_the_one_unused_longest_leaves(
    base: Base, tmp_path: Path
) -> None:
    trainer = Trainer(base, "tiny", tmp_path, ManualClock(), most_models=2)
    clients = [Client(trainer, number, Lora(rank=1)) for number in range(2)]
    clients[0].asks(Verb.CREATE)
    assert trainer.unused() is None
    clients[1].asks(Verb.CREATE)
    assert trainer.unused() == "s:train:0"

    clients[0].passes()

    assert trainer.unused() == "s:train:1"


def test_a_state_is_written_where_much_would_have_to_be_done_again(base: Base, tmp_path: Path) -> None:
    trainer = Trainer(base, "tiny", tmp_path, ManualClock(), most_bytes=len(a_pass()))
    client = Client(trainer, 0, Lora(rank=1))
    client.asks(Verb.CREATE)
    client.passes()
    assert trainer.write_what_is_due("s:train:0", Verb.FORWARD_BACKWARD) is None

    client.passes()

    assert trainer.write_what_is_due("s:train:0", Verb.FORWARD_BACKWARD) == Written("s:train:0", 0, 2)
    assert trainer.write_what_is_due("s:train:0", Verb.FORWARD_BACKWARD) is None


def test_a_late_process_deletes_no_newer_state_and_no_newer_saved_model(base: Base, tmp_path: Path) -> None:
    client = made(base, tmp_path)
    client.learns(8)
    save = Save(path="tinker://s:train:0/weights/a", overwrite=True).model_dump_json().encode()
    late = Client(a_trainer(base, tmp_path), 0, client.model.lora)
    late.asks(Verb.CREATE)
    client.asks(Verb.SAVE, save)

    late.learns(3)
    late.asks(Verb.SAVE, save)
    late.trainer.unload("s:train:0")

    assert files.read_saved(tmp_path / "tinker/saved/s:train:0/weights/a").step == 8
    assert files.state_seq(tmp_path / "tinker/state/s:train:0") == 16


def test_one_state_is_kept_beside_the_newest(base: Base, tmp_path: Path) -> None:
    client = made(base, tmp_path)

    client.learns(24)

    assert sorted(each.name for each in (tmp_path / "tinker/state/s:train:0").iterdir()) == ["32", "48"]


def test_weights_fit_whatever_the_adapters_were_drawn_from(base: Base, tmp_path: Path) -> None:
    client = made(base, tmp_path)
    client.asks(Verb.SAVE, Save(path="tinker://s:train:0/weights/a").model_dump_json().encode())
    other = Client(client.trainer, 1, Lora(rank=4, seed=9))
    other.asks(Verb.CREATE)

    other.asks(Verb.LOAD, Load(path="tinker://s:train:0/weights/a").model_dump_json().encode())

    assert other.passes() == client.passes()


def test_sequences_that_the_model_cannot_read_are_refused(base: Base, tmp_path: Path) -> None:
    client = made(base, tmp_path)
    too_long = [5] * (base.positions + 2)

    with pytest.raises(InvalidRequest, match="positions"):
        client.passes(a_pass(rows=[too_long]))
    with pytest.raises(InvalidRequest, match="positions"):
        client.trainer.score(None, too_long, 0)


def test_one_owner_has_no_more_on_the_disk_than_it_may_and_another_has_room(base: Base, tmp_path: Path) -> None:
    lora = Lora(rank=4, seed=1)
    size = base.make(lora).num_bytes(with_optimizer=False)
    # Two states of eight sizes together, and what is saved, of three.
    trainer = Trainer(base, "tiny", tmp_path, ManualClock(), most_disk_bytes=12 * size)
    client, other = Client(trainer, 0, lora), Client(trainer, 1, lora, owner="other")
    for each in (client, other):
        each.asks(Verb.CREATE)
        each.passes()
        each.updates()
    first, second = (Save(path=f"tinker://s:train:0/weights/{name}").model_dump_json().encode() for name in ("a", "b"))
    client.asks(Verb.SAVE, first)
    trainer.write("s:train:0")

    with pytest.raises(QuotaExceeded, match="delete saved ones"):
        client.asks(Verb.SAVE, second)
    other.asks(Verb.SAVE, Save(path="tinker://s:train:1/weights/b").model_dump_json().encode())
    shutil.rmtree(tmp_path / "tinker/saved/s:train:0/weights/a")
    client.asks(Verb.SAVE, second)


def test_models_whose_states_are_not_written_yet_take_their_part_of_the_disk(base: Base, tmp_path: Path) -> None:
    lora = Lora(rank=4, seed=1)
    size = base.make(lora).num_bytes(with_optimizer=False)
    trainer = Trainer(base, "tiny", tmp_path, ManualClock(), most_disk_bytes=17 * size)
    clients = [Client(trainer, number, lora) for number in range(3)]
    for each in clients[:2]:
        each.asks(Verb.CREATE)

    with pytest.raises(QuotaExceeded, match="finish sessions"):
        clients[2].asks(Verb.CREATE)
    # One state of each is on the disk, where there will be two.
    for each in clients[:2]:
        each.passes()
        each.updates()
        trainer.unload(each.model.model_id)
    with pytest.raises(QuotaExceeded, match="finish sessions"):
        clients[2].asks(Verb.CREATE)
    trainer.discard(clients[0].model.model_id)
    clients[2].asks(Verb.CREATE)
