"""A service's node of a training job on several hosts: what the gateway is told of it, and when it may be started.

The gateway begins each job under a trainer epoch of its own. A job that ended here is not started again: that it ended
is reported, the gateway ends it everywhere, and the next epoch's job follows.
"""

from flotilla.shared.schemas.service import Assignment, JobReport


class NodeOfJob:
    """What is known of the job of the assignment at hand.

    Args:
        host: address of this host, under which other nodes reach it.

    Attributes:
        port: of the job's store, where this is the first node and has opened it.
        ended: why the job ended here.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self.port: int | None = None
        self.ended: str | None = None

    def forget(self) -> None:
        """Begin with another assignment."""
        self.port = self.ended = None

    def report(self, assignment: Assignment | None) -> JobReport | None:
        """Return what the gateway is told; None where the experiment's ranks are all on one host."""
        if assignment is None or _num_nodes(assignment) == 1:
            return None
        host = None if self.port is None else self._host
        return JobReport(epoch=assignment.trainer_epoch, host=host, port=self.port, ended=self.ended)

    def may_start(self, wanted: Assignment) -> bool:
        """Whether all is known that the ranks of this host need, and the job has not ended already."""
        if _num_nodes(wanted) == 1:
            return True
        node = wanted.node
        return node is not None and self.ended is None and (node.rank == 0 or node.port is not None)


def is_next_job(mine: Assignment | None, theirs: Assignment | None) -> bool:
    """Whether an assignment is the same experiment's next job on several hosts."""
    is_same = mine is not None and theirs is not None and mine.experiment_id == theirs.experiment_id
    return is_same and mine is not None and _num_nodes(mine) > 1


def _num_nodes(assignment: Assignment) -> int:
    """Read how many hosts a job is on; the spec is validated where a worker is started."""
    section = assignment.spec.get("parallelism")
    count = section.get("nodes", 1) if isinstance(section, dict) else 1
    return count if isinstance(count, int) else 1
