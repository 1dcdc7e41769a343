"""Train several experiments in one process. Started by the trainers' supervisors, never by hand."""

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

    from flotilla.services.trainer.hosting.serving import MAX_LINE_BYTES, Workers


def main() -> None:
    """Speak with the supervisors over standard input and output until these have ended."""
    die_with_parent(os.getppid())
    # Ctrl-C reaches the whole process group; the supervisors decide when their workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    transformers_logging.disable_progress_bar()
    arm_process("trainer-worker")
    trace_process("trainer-worker")
    # What libraries print must not get between the messages.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    asyncio.run(_serve(answers))
    # The result of a computation still under way is not needed any more.
    os._exit(0)


async def _serve(answers: IO[bytes]) -> None:
    lines = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    await Workers(answers).serve(lines)


if __name__ == "__main__":
    main()
