"""The guard's one pass, in a fork of its own: read a job, make its place, run it, answer."""

import json
import os

from services.sandbox.guard import kernel, namespaces, session
from services.sandbox.guard.files import fetch, write_files
from services.sandbox.guard.job import (
    ANSWER_END,
    EXITED,
    KILL_NAMESPACE,
    KILL_UID,
    CellResult,
    Confinement,
    Job,
    JobResult,
    Orders,
)
from services.sandbox.guard.messages import read_message, write_all
from services.sandbox.guard.process import Surroundings, run_phase

_DECODER = json.JSONDecoder()


def attend(caller: int, place: "int | Exception", orders: Orders) -> None:
    """Run one job from a stream of the service and write its result there.

    Args:
        caller: the stream.
        place: what ``furnish`` returned, or raised.
        orders: those of the fork server.

    Raises:
        IsProgram: in the child that is the program.
    """
    text = read_message(caller)
    if not text:
        return  # the service went away before it had a job
    is_session = False
    try:
        job = Job.from_wire(_DECODER.raw_decode(text.decode())[0], orders)
        is_session = job.is_session
        if isinstance(place, Exception):
            raise place
        if is_session:
            write_files(job)
            session.serve(job, Surroundings(caller, place))
            return
        result = run_job(job, Surroundings(caller, place))
    except Exception as error:  # whatever went wrong in here is the sandbox's fault and must be told
        result = JobResult(error=f"{type(error).__name__}: {error}"[:1000])
    if is_session:
        session.tell(caller, CellResult(result, is_alive=False))
    else:
        write_all(caller, json.dumps(result.to_wire()).encode() + ANSWER_END)


def run_job(job: Job, surroundings: Surroundings) -> JobResult:
    """Write the files, run the phases until one fails, collect the files."""
    write_files(job)
    phases = []
    for phase in job.phases:
        phases.append(run_phase(phase, job, surroundings))
        if phases[-1].outcome != EXITED or phases[-1].return_code != 0:
            break
    files, notes = fetch(job.directory, job.fetch, job.limits) if job.fetch else ({}, [])
    return JobResult(phases=tuple(phases), files=files, notes=tuple(notes))


def furnish(orders: Orders) -> int:
    """Make the place of a run and give up every privilege that this took.

    Returns:
        See ``Surroundings.hardness``.

    Raises:
        OSError: the kernel refused, or a signal to everything would reach further than the program.
    """
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # otherwise this process's own files in /proc are root's
    scope, uid = orders.confinement.kill_scope, orders.confinement.uid
    if scope == KILL_NAMESPACE:
        check_kill_scope(orders.confinement)
        hardness = namespaces.furnish(orders.limits)
    else:
        hardness = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        check_kill_scope(orders.confinement)
    # The program may have our uid: it must not read our memory nor our descriptors.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    return hardness


def check_kill_scope(confinement: Confinement) -> None:
    """Make sure that a signal to everything reaches only the program, before one is ever sent.

    Raises:
        PermissionError: it would reach further.
    """
    if confinement.kill_scope == KILL_NAMESPACE and os.getpid() != 1:
        raise PermissionError("the guard is not in a process namespace of its own")
    if confinement.kill_scope == KILL_UID and (os.getuid() != confinement.uid or os.getuid() == 0):
        raise PermissionError(f"the guard has uid {os.getuid()}, not its own uid {confinement.uid}")
