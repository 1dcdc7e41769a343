"""The guard of a slot: it reads jobs, has them run one after the other, watches them and answers.

It lives beside the fork server and not below any run, so whatever it holds of a program is in the memory of no other.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import NoReturn

from flotilla.services.sandbox.guard import kernel, place, session
from flotilla.services.sandbox.guard.agent import check_kill_scope
from flotilla.services.sandbox.guard.files import fetch, write_files
from flotilla.services.sandbox.guard.job import (
    ANSWER_END,
    DONE,
    EXITED,
    KILL_NAMESPACE,
    KILL_UID,
    CellResult,
    Confinement,
    Job,
    JobResult,
    Orders,
)
from flotilla.services.sandbox.guard.messages import read_message, write_all
from flotilla.services.sandbox.guard.place import Place
from flotilla.services.sandbox.guard.process import run_phase
from flotilla.services.sandbox.guard.program import take_uid

_DECODER = json.JSONDecoder()


def guard(control: socket.socket, link: socket.socket, orders: Orders) -> NoReturn:
    """Be the guard of a slot until the service goes away.

    Args:
        control: of the service; a message of it carries a stream with one job.
        link: of the fork server.
        orders: those of the fork server.
    """
    try:
        _give_up_privileges(orders.confinement)
        kernel.give_memory_back()  # what it holds counts at level A
        requested = place.request(link)
        while True:
            message, ancillary, _, _ = control.recvmsg(1, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
            if not message:
                os._exit(0)
            caller = int.from_bytes(ancillary[0][2], sys.byteorder)
            _run_one(caller, link, requested, orders)
            os.close(caller)
            control.send(DONE)
            # The next one is made without a waiter, and beside no program.
            requested = place.request(link)
    except BaseException:  # this is a copy of the server and must not continue as one
        os._exit(1)


def _give_up_privileges(confinement: Confinement) -> None:
    """Keep what ends and watches programs.

    Raises:
        OSError: the kernel refused, or a signal to everything would reach further than a program.
    """
    if confinement.kill_scope == KILL_NAMESPACE:
        kernel.drop_capabilities()
    if confinement.kill_scope == KILL_UID:
        assert confinement.uid is not None
        take_uid(confinement.uid)
        check_kill_scope(confinement)
    # Programs may have our uid: they must not read our memory nor our descriptors.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # without the server nothing can be run


def _run_one(caller: int, link: socket.socket, requested: "place.Request | Exception", orders: Orders) -> None:
    """Run one job from a stream of the service and write its result there; all of it is gone then."""
    where: Place | Exception
    try:
        where = place.take(link, requested, orders)
    except OSError:
        try:
            where = place.take(link, place.request(link), orders)
        except OSError as error:  # the service learns it
            where = error
    with suppress(ConnectionError):  # the service went away, or wants no answer any more
        _attend(caller, where, orders)
    if isinstance(where, Place):
        where.end()
        where.close()


def _attend(caller: int, where: "Place | Exception", orders: Orders) -> None:
    """Read a job, run it and answer.

    Raises:
        ConnectionError: the answer is not read.
    """
    text = read_message(caller)
    if not text:
        return  # the service went away before it had a job
    is_session = False
    try:
        job = Job.from_wire(_DECODER.raw_decode(text.decode())[0], orders)
        is_session = job.is_session
        if isinstance(where, Exception):
            raise where
        write_files(job, where.directory)
        if is_session:
            session.serve(job, caller, where)
            return
        result = run_job(job, caller, where)
    except ConnectionError:
        raise
    except Exception as error:  # any error in here is the sandbox's fault and must be reported
        result = JobResult(error=f"{type(error).__name__}: {error}"[:1000])
    if is_session:
        session.tell(caller, CellResult(result, is_alive=False))
    else:
        write_all(caller, json.dumps(result.to_wire()).encode() + ANSWER_END)


def run_job(job: Job, caller: int, where: Place) -> JobResult:
    """Run the phases until one fails, collect the files."""
    phases = []
    for number, phase in enumerate(job.phases, start=1):
        phases.append(run_phase(phase, job, where, caller, is_last=number == len(job.phases)))
        if phases[-1].outcome != EXITED or phases[-1].return_code != 0:
            break
    if len(phases) < len(job.phases):
        where.end()
    files, notes = fetch(where.directory, job.fetch, job.limits) if job.fetch else ({}, [])
    return JobResult(phases=tuple(phases), files=files, notes=tuple(notes))
