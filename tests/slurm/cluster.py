"""A cluster on one machine: munge and Slurm of Debian, as processes of a test that keep everything in one folder."""

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "srun")
UP_SECONDS = 60.0
END_SECONDS = 20.0
NODES = 3
"""Of one machine: each is a daemon with a port of its own, as parts of a heterogeneous job want nodes of their own."""
CPUS = 8
"""Of each, and more than there are: what runs there waits more than it computes."""


def missing_programs() -> list[str]:
    """List what the machine lacks of Slurm."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


@dataclass(frozen=True)
class Cluster:
    """A cluster that runs.

    Attributes:
        folder: of everything that it keeps.
        environment: in which its commands find it.
    """

    folder: Path
    environment: dict[str, str]

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command of Slurm's and return what it writes."""
        result = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        assert not check or result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
        return result.stdout

    def submit(self, *arguments: str, cwd: Path, environment: dict[str, str]) -> str:
        """Submit a job and return its number."""
        result = subprocess.run(
            ("sbatch", "--parsable", *arguments),
            cwd=cwd,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.strip().partition(";")[0]

    def job(self, number: str) -> dict[str, str]:
        """Read what the controller knows of a job, or of the first part of a heterogeneous one."""
        first = self.run("scontrol", "--oneliner", "show", "job", number).splitlines()[0]
        return dict(word.split("=", 1) for word in first.split() if "=" in word)


def wait_for(what: Callable[[], bool], seconds: float, said: Callable[[], object]) -> None:
    """Wait for a state."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, said()
        time.sleep(0.5)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """Start munge, the controller and one node; end them afterwards, by their process ids."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    # munge wants folders that nobody else could have put something into.
    for name in ("munge", "state", *(f"spool-node{number}" for number in range(NODES))):
        (folder / name).mkdir(mode=0o755)
    key, munge_socket = folder / "munge" / "key", folder / "munge" / "socket"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    host = socket.gethostname()
    controller, *ports = _free_ports(1 + NODES)
    names = [f"node{number}" for number in range(NODES)]
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} State=UNKNOWN"
        for name, port in zip(names, ports, strict=True)
    )
    configuration = folder / "slurm.conf"
    configuration.write_text(
        f"""ClusterName=trial
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={munge_socket},cred_expire=2
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
KillWait=30
ReturnToService=2
RebootProgram=/bin/false
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=FORCE:4
"""
    )
    environment = {**os.environ, "PATH": path, "SLURM_CONF": str(configuration)}
    cluster = Cluster(folder, environment)
    with ExitStack() as stack:
        munged = ["munged", "--foreground", f"--key-file={key}", f"--socket={munge_socket}"]
        for option in ("pid-file", "seed-file", "log-file"):
            munged.append(f"--{option}={folder}/munge/{option}")
        stack.enter_context(_started([*munged, "--force"], environment, folder / "munged.out"))
        wait_for(munge_socket.exists, UP_SECONDS, lambda: (folder / "munged.out").read_text())
        settings = ["-D", "-f", str(configuration)]
        stack.enter_context(_started(["slurmctld", "-c", *settings], environment, folder / "slurmctld.out"))
        for name in names:
            stack.enter_context(_started(["slurmd", "-N", name, *settings], environment, folder / f"slurmd-{name}.out"))

        def is_up() -> bool:
            return cluster.run("sinfo", "--noheader", "--format=%T %D", check=False).strip() == f"idle {NODES}"

        def logs() -> str:
            return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(folder.glob("slurm*.*")))

        wait_for(is_up, UP_SECONDS, logs)
        yield cluster


@contextmanager
def _started(command: list[str], environment: dict[str, str], log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
