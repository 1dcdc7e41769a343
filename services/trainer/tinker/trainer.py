"""Carries out the requests of trained models, one after another, and outlives its own end.

Each model's requests are done in their order. What a request did is on the disk only now and then, behind an update; a
process that takes over loads the last state and does the later requests again, whose answers stay as they were given.
On one device the same requests give the same bits.
"""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flotilla.services.trainer.tinker import files
from flotilla.services.trainer.tinker.files import Usage
from flotilla.services.trainer.tinker.losses import token_losses
from flotilla.services.trainer.tinker.slots import Base, Slot, micro_batches
from flotilla.shared.clock import Clock
from flotilla.shared.errors import InvalidRequest, NotFound
from flotilla.shared.tinker.messages import Datum, ForwardBackwardRequest, write_output
from flotilla.shared.tinker.paths import Kind, SavedPath, runs_with_state, state_of
from flotilla.shared.tinker.queue import Answer, Form, Request
from flotilla.shared.tinker.records import AdamStep, Load, Lora, Model, Save, Saved, Update, Verb

STEPS_BETWEEN_STATES = 8
TARGETS = "target_tokens"
NO_SUCH_MODEL = "there is no such model"
MOST_TARGETS = 1 << 18
"""Of one sequence: each reads the hidden state of its position."""
MOST_MODELS = 32
MOST_UNWRITTEN_BYTES = 256 * 1024 * 1024
"""Of requests that are kept in Redis, so that another process could do them again."""


@dataclass(eq=False)
class Kept:
    """A model in this process.

    Attributes:
        slot: its weights.
        owner: whose it is.
        seq: its last request that was done.
        on_disk: the last request that its state on the disk has.
        num_bytes: of the requests since, which would be done again.
    """

    slot: Slot
    owner: str
    seq: int
    on_disk: int
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """Requests of a model that its state on the disk has now, from one place to another."""

    model_id: str
    first: int
    last: int


class Trainer:
    """Does requests; blocks. It knows nothing of queues.

    Args:
        base: the model that all share.
        name: of the base, in what is saved.
        data: the fleet's directory.
        clock: for what is saved.
        most_models: that are in memory at a time; others wait on the disk.
        most_bytes: of requests whose effect no state on the disk has.
        most_disk_bytes: of one owner's models, their states included.
    """

    def __init__(
        self,
        base: Base,
        name: str,
        data: Path,
        clock: Clock,
        *,
        most_models: int = MOST_MODELS,
        most_bytes: int = MOST_UNWRITTEN_BYTES,
        most_disk_bytes: int = sys.maxsize,
    ) -> None:
        self._base, self._name, self._data, self._clock = base, name, data, clock
        self._most_models, self._most_bytes = most_models, most_bytes
        self._usage = Usage(data, most_disk_bytes)
        # The one that was used last is the last.
        self._kept: dict[str, Kept] = {}

    def knows(self, model_id: str) -> bool:
        """Return whether a model is in this process."""
        return model_id in self._kept

    def reached(self, model_id: str) -> int:
        """Return the last request that was done of a model, here or as its state on the disk has it; -1 for none."""
        kept = self._kept.get(model_id)
        if kept is not None:
            return kept.seq
        on_disk = files.state_seq(state_of(self._data, model_id))
        return -1 if on_disk is None else on_disk

    def go_back(self, model_id: str, seq: int) -> None:
        """Drop what has a request, in memory and on the disk: it is done again from before."""
        self.forget(model_id)
        files.drop_states(state_of(self._data, model_id), seq)

    def restore(self, model: Model, before: int) -> int:
        """Take a model as it is on the disk without a request and later ones; returns its last one, -1 for none."""
        directory = state_of(self._data, model.model_id)
        seq = files.state_seq(directory, before)
        if seq is None:
            return -1
        slot = self._base.make(model.lora)
        files.load_state(directory, slot, seq)
        self._kept[model.model_id] = Kept(slot, model.owner, seq, seq)
        return seq

    def forget(self, model_id: str) -> None:
        """Drop what is in memory, such as half of what a request should have added."""
        self._kept.pop(model_id, None)

    def unused(self) -> str | None:
        """Return the model that has to leave memory before another one comes; None: there is room."""
        return next(iter(self._kept)) if len(self._kept) >= self._most_models else None

    def models(self) -> list[str]:
        """List those that are in memory, or have a state on the disk."""
        return sorted({*self._kept, *runs_with_state(self._data)})

    def discard(self, model_id: str) -> None:
        """Drop a model that is over, with its state."""
        self.forget(model_id)
        shutil.rmtree(state_of(self._data, model_id), ignore_errors=True)

    def unload(self, model_id: str) -> Written | None:
        """Write a model's state, and drop it from memory; None where it is not there, or nothing was new."""
        kept = self._kept.get(model_id)
        written = self.write(model_id) if kept is not None else None
        self.forget(model_id)
        return written

    def write(self, model_id: str) -> Written | None:
        """Write a model's state; None where nothing is new."""
        kept = self._kept.get(model_id)
        return self._write(model_id) if kept is not None and kept.on_disk < kept.seq else None

    def do(self, request: Request, model: Model) -> Answer:
        """Do one request.

        Raises:
            FlotillaError: it cannot be done, and has done nothing.
        """
        match request.verb:
            case Verb.CREATE:
                slot = self._base.make(model.lora)
                self._check_room(model, slot)
                self._keep(request, model, slot)
                return Answer.json({"type": "create_model", "model_id": request.model_id})
            case Verb.LOAD:
                return self._load(request, model)
            case Verb.UNLOAD:
                if request.model_id in self._kept:
                    self._kept[request.model_id].seq = request.seq
                return Answer.json({"type": request.verb, "model_id": request.model_id})
        kept = self._kept.pop(request.model_id, None)
        if kept is None:
            raise NotFound(f"{request.model_id}: {NO_SUCH_MODEL}")
        self._kept[request.model_id] = kept
        kept.seq = request.seq
        answer = self._done(kept, request)
        kept.num_bytes += len(request.body) if request.verb != Verb.FORWARD else 0
        return answer

    def _done(self, kept: Kept, request: Request) -> Answer:
        match request.verb:
            case Verb.FORWARD | Verb.FORWARD_BACKWARD:
                return self._forward_backward(kept.slot, ForwardBackwardRequest.read(request.body))
            case Verb.OPTIM_STEP:
                how = AdamStep.model_validate_json(request.body)
                norm = kept.slot.update(how)
                answer = Answer.json({"metrics": {"grad_norm": norm, "step": float(kept.slot.step)}})
                update = Update(step=kept.slot.step, grad_norm=norm, learning_rate=how.learning_rate)
                return replace(answer, update=update)
            case Verb.SAVE | Verb.SAVE_FOR_SAMPLER | Verb.SAVE_EXTERNAL:
                return self._save(kept, Save.model_validate_json(request.body), request)
        raise InvalidRequest(f"{request.verb} is not served")

    def write_what_is_due(self, model_id: str, verb: str) -> Written | None:
        """Write the state of a model whose request was done, or of the one with most to do again; None: none is due."""
        kept = self._kept.get(model_id)
        is_step = kept is not None and verb == Verb.OPTIM_STEP and kept.slot.step % STEPS_BETWEEN_STATES == 0
        if kept is not None and (is_step or verb == Verb.LOAD):
            return self._write(model_id)
        if verb == Verb.UNLOAD:
            return self.unload(model_id)
        if sum(each.num_bytes for each in self._kept.values()) > self._most_bytes:
            return self._write(max(self._kept, key=lambda each: self._kept[each].num_bytes))
        return None

    def _write(self, model_id: str) -> Written:
        kept = self._kept[model_id]
        files.keep_state(state_of(self._data, model_id), kept.slot, kept.seq, kept.owner)
        written = Written(model_id, kept.on_disk + 1, kept.seq)
        kept.on_disk, kept.num_bytes = kept.seq, 0
        return written

    def drop_snapshot(self, path: str) -> None:
        """Delete what was saved for sampling sessions in flight, which sample from a newer one."""
        shutil.rmtree(SavedPath.read(path).below(self._data), ignore_errors=True)

    def score(self, path: str | None, token_ids: Sequence[int], count: int) -> tuple[npt.NDArray[np.float32], Tensor]:
        """Score a prompt under saved weights, or the base's.

        Args:
            path: of the weights; None: the base's.
            token_ids: T tokens of the vocabulary, at least 2.
            count: how many of the likeliest tokens are wanted at each place; 0 for none.

        Returns:
            [T - 1] log-probabilities of all but the first token; [2, T - 1, count] the likeliest: ids, then nats.

        Raises:
            InvalidRequest: there is no token to score, or one that is not the model's.
            NotFound: there are no such weights.
        """
        tokens = np.asarray(token_ids, np.int64)
        self._check(tokens)
        if tokens.size < 2:
            raise InvalidRequest("a prompt that is scored has at least two tokens")
        self._check_size(tokens.size, 0)
        slot = None if path is None else self._saved_slot(SavedPath.read(path))
        with torch.no_grad(), self._base.live(slot):
            (found,) = self._base.log_probs([(tokens[:-1], tokens[1:])])
            top = torch.zeros(2, tokens.size - 1, 0)
            if count:
                top = torch.stack([each.double() for each in self._base.most_likely(tokens[:-1], count)])
        return found.cpu().numpy(), top

    def _saved_slot(self, path: SavedPath) -> Slot:
        directory = path.below(self._data)
        slot = self._base.make(files.read_saved(directory).lora)
        files.load_saved(directory, slot, with_optimizer=False)
        return slot

    def _keep(self, request: Request, model: Model, slot: Slot) -> None:
        before = self._kept.pop(request.model_id, None)
        on_disk = -1 if before is None else before.on_disk
        self._kept[request.model_id] = Kept(slot, model.owner, request.seq, on_disk)

    def _check_room(self, model: Model, slot: Slot) -> None:
        """Refuse a model whose states would have no room on the disk beside the owner's others."""
        self._usage.check(model.owner, self._states_of(model.owner) | {model.model_id: slot.state_bytes()})

    def _states_of(self, owner: str) -> dict[str, int]:
        return {name: kept.slot.state_bytes() for name, kept in self._kept.items() if kept.owner == owner}

    def _load(self, request: Request, model: Model) -> Answer:
        wanted = Load.model_validate_json(request.body)
        path = SavedPath.read(wanted.path)
        directory = path.below(self._data)
        saved = files.read_saved(directory)
        if saved.owner != model.owner and not saved.is_public:
            raise NotFound(f"{wanted.path}: there is no saved model of this name")
        if _shape(saved.lora) != _shape(model.lora):
            raise InvalidRequest(f"{wanted.path} is of another rank or other layers than {request.model_id}")
        if wanted.optimizer and not saved.has_optimizer:
            raise InvalidRequest(f"{wanted.path} was saved to be sampled from, without the optimiser's state")
        slot = self._base.make(saved.lora)
        self._check_room(model, slot)
        files.load_saved(directory, slot, with_optimizer=wanted.optimizer)
        self._keep(request, model, slot)
        return Answer.json({"type": "load_weights", "path": wanted.path, "model_id": request.model_id})

    def _save(self, kept: Kept, wanted: Save, request: Request) -> Answer:
        path = SavedPath.read(wanted.path)
        directory = path.below(self._data)
        is_new = wanted.overwrite or path.kind is Kind.EPHEMERAL or not directory.exists()
        # A request that is done again after a restart finds what it wrote.
        if not is_new and files.read_saved(directory).step != kept.slot.step:
            raise InvalidRequest(f"{wanted.path} is there already: overwrite it, or choose another name")
        more = kept.slot.num_bytes(with_optimizer=path.kind is Kind.TRAINING)
        self._usage.check(kept.owner, self._states_of(kept.owner), more)
        now = self._clock.now()
        saved = Saved(
            path=wanted.path,
            owner=kept.owner,
            created=now,
            seq=request.seq,
            step=kept.slot.step,
            num_bytes=0,
            lora=kept.slot.lora,
            has_optimizer=path.kind is Kind.TRAINING,
            expires=None if wanted.ttl_seconds is None else now + wanted.ttl_seconds,
            user_metadata=wanted.user_metadata,
        )
        files.save(directory, kept.slot, self._name, saved)
        if path.kind is Kind.EPHEMERAL:
            return Answer.json({"type": request.verb, "sampling_session_id": wanted.sampling_session_id})
        return Answer.json({"type": request.verb, "path": wanted.path})

    def _forward_backward(self, slot: Slot, wanted: ForwardBackwardRequest) -> Answer:
        checked = [self._checked(datum) for datum in wanted.data]
        outputs: list[dict[str, npt.NDArray[np.float32]]] = [{} for _ in checked]
        total = 0.0
        before = {name: None if each.grad is None else each.grad.clone() for name, each in slot.parameters.items()}
        try:
            with torch.set_grad_enabled(not wanted.is_forward_only), self._base.live(slot):
                for numbers in micro_batches([targets.size for _, targets in checked]):
                    found = self._base.log_probs([checked[number] for number in numbers])
                    losses = [
                        token_losses(wanted.loss, each, _tensors(wanted.data[number], each), wanted.config)
                        for number, each in zip(numbers, found, strict=True)
                    ]
                    loss = torch.stack([each.sum() for each in losses]).sum()
                    total += float(loss.detach())
                    if not wanted.is_forward_only and loss.requires_grad:
                        torch.autograd.backward(loss)
                    for number, log_probs, each in zip(numbers, found, losses, strict=True):
                        outputs[number] = {"logprobs": _array(log_probs)}
                        if wanted.loss == "cross_entropy":
                            outputs[number]["elementwise_loss"] = _array(each)
        except BaseException:
            # Nothing of a request that fails may be in the next update.
            for name, each in slot.parameters.items():
                each.grad = before[name]
            raise
        content = write_output(outputs, {"loss:sum": total})
        return Answer(Form.PROTOBUF, content, loss=None if wanted.is_forward_only else total)

    def _checked(self, datum: Datum) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        targets = datum.inputs.get(TARGETS)
        if targets is None or targets.ndim not in {1, 2} or targets.shape[0] != datum.token_ids.size:
            raise InvalidRequest(
                f"loss_fn_inputs: {TARGETS} must have a row for each of the {datum.token_ids.size} tokens read"
            )
        self._check_size(datum.token_ids.size, targets.size)
        whole = targets.astype(np.int64, copy=False)
        self._check(datum.token_ids)
        self._check(whole.reshape(-1))
        return datum.token_ids, whole

    def _check_size(self, tokens: int, targets: int) -> None:
        if tokens > self._base.positions:
            raise InvalidRequest(f"a sequence has {tokens} tokens, the model {self._base.positions} positions")
        if targets > MOST_TARGETS:
            raise InvalidRequest(f"{TARGETS} has {targets} elements: at most {MOST_TARGETS} for one sequence")

    def _check(self, tokens: npt.NDArray[np.int64]) -> None:
        if tokens.size and not (int(tokens.min()) >= 0 and int(tokens.max()) < self._base.vocabulary):
            raise InvalidRequest(f"token ids must lie in [0, {self._base.vocabulary})")


def _shape(lora: Lora | None) -> tuple[int, bool, bool] | None:
    return None if lora is None else lora.shape


def _tensors(datum: Datum, like: Tensor) -> dict[str, Tensor]:
    return {
        name: torch.from_numpy(each.astype(np.float32)).to(like.device)
        for name, each in datum.inputs.items()
        if name != TARGETS
    }


def _array(tensor: Tensor) -> npt.NDArray[np.float32]:
    found: npt.NDArray[np.float32] = tensor.detach().float().cpu().numpy()
    return found
