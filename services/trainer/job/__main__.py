"""Start the ranks of a training job on this host. Started by the trainer's supervisor, never by hand.

``trainer.job RANKS [NODE NODES HOST [STORE_HOST PORT]]``: ranks on this host; of several hosts the number of
this one, how many there are, its address, and where the first one's store is.
"""

import os
import signal
import sys
from collections.abc import Sequence

from flotilla.shared.children.processes import collecting_later, die_with_parent

with collecting_later():
    from flotilla.services.trainer.job.launcher import run_job
    from flotilla.services.trainer.job.rendezvous import Node


def main() -> None:
    """Start the ranks that the arguments ask for, and end with them."""
    die_with_parent(os.getppid())
    # Ctrl-C reaches the whole process group; the supervisor decides when its worker ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    sys.exit(run_job(node_of(sys.argv[1:]), answers))


def node_of(words: Sequence[str]) -> Node:
    """Read the arguments."""
    if len(words) == 1:
        return Node(int(words[0]))
    ranks, rank, count, host, *store = words
    store_host, port = (store[0], int(store[1])) if store else (None, 0)
    return Node(int(ranks), int(rank), int(count), host, store_host, port)


if __name__ == "__main__":
    main()
