"""Start the ranks of a training job. Started by the trainer's supervisor, never by hand: ``services.trainer.job N``."""

import os
import signal
import sys

from shared.interpreter import collecting_later
from shared.processes import die_with_parent

with collecting_later():
    from services.trainer.job.launcher import run_job


def main() -> None:
    """Start as many ranks as the first argument says, and end with them."""
    die_with_parent(os.getppid())
    # Ctrl-C reaches the whole process group; the supervisor decides when its worker ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    sys.exit(run_job(int(sys.argv[1]), answers))


if __name__ == "__main__":
    main()
