"""The life of a rank that is not the first: read the opening, join the group, execute commands, report why it ends."""

import asyncio
import logging
from functools import partial
from typing import IO

from flotilla.services.trainer.parallel.commands import Opening
from flotilla.services.trainer.parallel.job import OPENING, Place, entered, is_lost_peer
from flotilla.services.trainer.wire import EXIT_PEER_LOST, Line, Status
from flotilla.services.trainer.worker.follower import Follower
from flotilla.services.trainer.worker.run import EXIT_DONE, EXIT_FAILED, describe_failure, end_for_silence
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import FlotillaError
from flotilla.shared.models.hub import fetched
from flotilla.shared.schemas.service import WorkState
from flotilla.shared.telemetry import logging as telemetry

log = logging.getLogger(__name__)


class Voice:
    """Reports to the supervisor of a follower host the progress of its ranks, and what is on their devices."""

    def __init__(self, answers: IO[bytes]) -> None:
        self._answers = answers
        self._state = WorkState.STARTING
        self._step: int | None = None
        self._holds_devices: bool | None = None

    def say_step(self, step: int | None) -> None:
        """The ranks can train, or have trained a step."""
        self._state, self._step = WorkState.RUNNING, step
        self._say()

    def say_devices(self, are_held: bool) -> None:
        """The ranks will have their weights on their devices, or have released them."""
        self._holds_devices = are_held
        self._say()

    def _say(self) -> None:
        told = Status(state=self._state, step=self._step, version=None, holds_devices=self._holds_devices)
        _say(self._answers, told)


def follow(place: Place, answers: IO[bytes]) -> int:
    """Execute the leader's commands until it releases this rank; returns the exit code.

    Args:
        place: of this process.
        answers: the supervisor's, to which the leader writes, too; a line is written at once.
    """
    store = place.store()
    opening = Opening.model_validate_json(store.get(OPENING))
    telemetry.configure_logging("trainer-worker", opening.log_level, opening.log_format)
    telemetry.experiment_id.set(opening.experiment_id)
    spec = validate_spec(opening.spec)
    # The first rank of a host that is not the leader's speaks for it.
    is_first = place.local_rank == 0
    if is_first:
        try:
            asyncio.run(_fetch(spec))
        except FlotillaError as error:
            return _say_failure(answers, place, error)
    with entered(place, store, spec.parallelism, partial(end_for_silence, answers)) as (ranks, channel):
        try:
            voice = Voice(answers) if is_first else None
            on_status, on_devices = (None, None) if voice is None else (voice.say_step, voice.say_devices)
            Follower(spec, ranks, channel, on_status, on_devices).run()
        except Exception as error:
            # Whatever it is, the other ranks wait for this one: it ends, and so do they.
            if is_lost_peer(error):
                log.error("a rank is lost", exc_info=error)  # noqa: TRY400
                return EXIT_PEER_LOST
            return _say_failure(answers, place, error)
    return EXIT_DONE


async def _fetch(spec: ExperimentSpec) -> None:
    """Download on this host what the leader downloads on its own."""
    await fetched(spec.model)
    for model in spec.algorithm.models.values():
        await fetched(model)


def _say_failure(answers: IO[bytes], place: Place, error: Exception) -> int:
    log.error("training failed", exc_info=error)
    failed = describe_failure(error)
    cause = f"rank {place.rank} of {place.size}: {failed.failure.cause}"
    _say(answers, failed.model_copy(update={"failure": failed.failure.model_copy(update={"cause": cause})}))
    return EXIT_FAILED


def _say(answers: IO[bytes], line: Line) -> None:
    answers.write(line.line())
    answers.flush()
