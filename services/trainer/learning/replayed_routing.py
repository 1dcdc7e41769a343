"""Router replay in the passes of a step: replayed choices, recorded ones, and their disagreement."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.metrics import Metrics, Tally
from flotilla.services.trainer.data.batch import TrainingBatch
from flotilla.services.trainer.data.micro_batch import MicroBatch
from flotilla.services.trainer.data.packing import token_places
from flotilla.services.trainer.models.log_probs import Policy
from flotilla.services.trainer.parallel.ranks import Ranks
from flotilla.shared.models.routers import Routing
from flotilla.shared.schemas.routing import Ids, RoutingSizes


class OldRouting:
    """Collects what the policy's routers choose in a pass over all of a step's sequences (R2).

    Args:
        batch: the step's.
        sizes: of the routers.
    """

    def __init__(self, batch: TrainingBatch, sizes: RoutingSizes) -> None:
        self._token_ids = batch.token_ids
        self._ends = np.cumsum([len(ids) for ids in batch.token_ids])
        self._ids = np.zeros((self._ends[-1], sizes.num_layers, sizes.top_k), sizes.dtype)

    def add(self, micro: MicroBatch, chosen: Tensor) -> None:
        """Record a micro-batch of this rank: [rows, W, layers, top_k]."""
        flat = chosen.flatten(0, 1).cpu().numpy()
        for number, places in token_places(micro.layout, self._token_ids).items():
            end = self._ends[number]
            self._ids[end - len(places) : end] = flat[places]

    def of_all(self, ranks: Ranks) -> tuple[Ids, ...]:
        """Return what all ranks recorded, sequence by sequence: [L, layers, top_k]; every rank calls it at once."""
        if ranks.is_several:
            for layer in range(self._ids.shape[1]):  # All at once would take four times as much on the device.
                own = torch.from_numpy(self._ids[:, layer].astype(np.int32)).to(ranks.device)
                self._ids[:, layer] = ranks.sum(own).cpu().numpy()
        return tuple(np.split(self._ids, self._ends[:-1]))


@contextmanager
def told(policy: Policy, micro: MicroBatch, recorded: OldRouting | None = None) -> Iterator[None]:
    """Replay choices of the policy's routers in the passes made while the block runs.

    Args:
        policy: its routers choose freely if the spec replays nothing.
        micro: of the pass, with the replayed choices.
        recorded: receives their choices; nothing is replayed then.
    """
    routing: Routing | None = policy.routing
    if routing is None:
        yield
    elif recorded is None:
        with routing.replaying(micro.inputs.experts):
            yield
    else:
        with routing.recording():
            yield
        if not micro.is_empty:
            recorded.add(micro, routing.taken(micro.inputs.token_ids.shape[0]))


def untold(_: MicroBatch) -> AbstractContextManager[None]:
    """Let routers choose for themselves."""
    return nullcontext()


def disagreement(policy: Policy) -> Metrics:
    """Record the share of routers that would have chosen other experts in the last pass than the replayed ones."""
    counts = None if policy.routing is None else policy.routing.disagreement()
    return {} if counts is None else {"router/disagreement": Tally(*counts)}
