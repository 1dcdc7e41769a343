"""The life of a rank that is not the first: read the opening, enter the group, obey, say why it ends."""

import logging
from functools import partial
from typing import IO

from services.trainer.parallel.commands import Opening
from services.trainer.parallel.job import OPENING, Place, entered, is_lost_peer
from services.trainer.worker.follower import Follower
from services.trainer.worker.run import EXIT_DONE, EXIT_FAILED, EXIT_PEER_LOST, describe_failure, end_for_silence
from shared.config.load import validate_spec
from shared.telemetry import logging as telemetry

log = logging.getLogger(__name__)


def follow(place: Place, answers: IO[bytes]) -> int:
    """Do what the leader says until it lets this rank go; returns the exit code.

    Args:
        place: of this process.
        answers: the supervisor's, to which the leader writes, too; a line is written at once.
    """
    store = place.store()
    opening = Opening.model_validate_json(store.get(OPENING))
    telemetry.configure_logging("trainer-worker", opening.log_level, opening.log_format)
    telemetry.experiment_id.set(opening.experiment_id)
    spec = validate_spec(opening.spec)
    with entered(place, store, spec.parallelism, partial(end_for_silence, answers)) as (ranks, channel):
        try:
            Follower(spec, ranks, channel).run()
        except Exception as error:
            # Whatever it is, the other ranks wait for this one: it ends, and so do they.
            if is_lost_peer(error):
                log.error("a rank is gone", exc_info=error)  # noqa: TRY400
                return EXIT_PEER_LOST
            log.exception("training failed")
            failed = describe_failure(error)
            cause = f"rank {place.rank} of {place.size}: {failed.failure.cause}"
            told = failed.model_copy(update={"failure": failed.failure.model_copy(update={"cause": cause})})
            answers.write(told.line())
            answers.flush()
            return EXIT_FAILED
    return EXIT_DONE
