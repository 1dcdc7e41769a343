"""The critic's update of one mini-batch."""

from collections.abc import Sequence
from functools import partial

from flotilla.services.trainer.algorithms.aggregation import Denominators, count_sampled
from flotilla.services.trainer.algorithms.metrics import Metrics, combine
from flotilla.services.trainer.data.micro_batch import MicroBatch
from flotilla.services.trainer.learning.pass_sizes import PassSizes
from flotilla.services.trainer.learning.passes import Cut
from flotilla.services.trainer.learning.prepared import Prepared
from flotilla.services.trainer.models.critic import Critic


def teach(critic: Critic, prepared: Prepared, cut: Cut, sizes: PassSizes) -> Metrics:
    """Make the critic's update of one mini-batch, of which its ranks are given their shares."""
    found = sizes.fit(cut, partial(_accumulate, critic, prepared), critic.optimizer.clear)
    if found is None:
        return {}
    critic.update()
    return found


def _accumulate(critic: Critic, prepared: Prepared, micro_batches: Sequence[MicroBatch]) -> Metrics | None:
    ranks = critic.ranks
    assert prepared.values is not None and prepared.returns is not None
    if not micro_batches:
        return None
    own = Denominators.total(count_sampled(micro.sequences) for micro in micro_batches)
    denominators = own if not ranks.is_several else Denominators.from_tensor(ranks.sum(own.as_tensor()))
    tallies = [
        critic.accumulate(micro, prepared.values, prepared.returns, denominators, num_ranks=ranks.data_size)
        for micro in micro_batches
    ]
    return combine(tallies)
