"""Train one experiment in a process of its own. Started by the trainer's supervisor, never by hand."""

import asyncio
import os
import signal
import sys
from typing import IO

from flotilla.shared.children.processes import collecting_later, die_with_parent
from flotilla.shared.faults.armed import arm_process
from flotilla.shared.telemetry.tracing.recording import trace_process

with collecting_later():
    from transformers.utils import logging as transformers_logging

    from flotilla.services.trainer.parallel.job import Place
    from flotilla.services.trainer.worker.follower_process import follow
    from flotilla.services.trainer.worker.run import Orphaned, WorkerProcess

EXIT_ORPHANED = 3


def main() -> None:
    """Speak with the supervisor over standard input and output until one of both ends."""
    die_with_parent(os.getppid())
    # Ctrl-C reaches the whole process group; the supervisor decides when its worker ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    transformers_logging.disable_progress_bar()
    place = Place.of(os.environ)
    arm_process("trainer-worker" if place is None or place.rank == 0 else "trainer-follower")
    if place is None or place.rank == 0:
        trace_process("trainer-worker")
    # What libraries print must not get between the messages.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if place is not None and place.rank > 0:
        sys.exit(follow(place, answers))
    sys.exit(asyncio.run(_serve(answers, place)))


async def _serve(answers: IO[bytes], place: Place | None) -> int:
    orders = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    try:
        return await WorkerProcess(orders, answers, place).run()
    except Orphaned:
        return EXIT_ORPHANED


if __name__ == "__main__":
    main()
