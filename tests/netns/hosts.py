"""Hosts made of network namespaces, joined by a switch whose links can be cut and slowed."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.fleet import ROOT

NET = "10.213.77"
MTU = "16000"
"""Large frames: the switch is a process, and pays for each."""


class Hosts:
    """Namespaces with an address each; the last link leads to this process's own namespace."""

    def __init__(self, names: Sequence[str]) -> None:
        self._tag = f"{os.getpid() % 100_000:05d}"
        self.names = list(names)
        self._links = [f"fl{self._tag}x{number}" for number in range(len(names) + 1)]
        self._switch: subprocess.Popen[bytes] | None = None

    def address(self, name: str) -> str:
        """Its address."""
        return f"{NET}.{self.names.index(name) + 1}"

    def _namespace(self, name: str) -> str:
        return f"fl{self._tag}-{name}"

    def open(self) -> None:
        """Make namespaces, devices and the switch."""
        command = [sys.executable, "-m", "tests.netns.switch", *self._links]
        self._switch = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._switch.stdout is not None
        assert self._switch.stdout.readline() == b"ready\n"
        for number, name in enumerate(self.names):
            namespace = self._namespace(name)
            _ip("netns", "add", namespace)
            _ip("link", "set", self._links[number], "netns", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
            _up(self._links[number], f"{NET}.{number + 1}", "-n", namespace)
        _up(self._links[-1], f"{NET}.254")

    def close(self) -> None:
        """Remove all of it."""
        for name in self.names:
            subprocess.run(["ip", "netns", "del", self._namespace(name)], check=False, capture_output=True)
        if self._switch is not None:
            with self._switch as switch:
                assert switch.stdin is not None
                switch.stdin.close()

    def cut(self, *directions: tuple[str, str]) -> None:
        """Lose all that goes from one host to another; no pair mends everything."""
        self._rule(*({"from": self.names.index(a), "to": self.names.index(b), "drop": True} for a, b in directions))

    def slow(self, delay_seconds: float, loss: float) -> None:
        """Delay what goes between hosts, and lose a share of it."""
        count = range(len(self.names))
        self._rule(*({"from": a, "to": b, "delay": delay_seconds, "loss": loss} for a in count for b in count))

    def _rule(self, *rules: Mapping[str, object]) -> None:
        assert self._switch is not None and self._switch.stdin is not None and self._switch.stdout is not None
        self._switch.stdin.write(json.dumps(rules).encode() + b"\n")
        self._switch.stdin.flush()
        self._switch.stdout.readline()

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> "subprocess.Popen[bytes]":
        """Start a program on a host."""
        with log.open("ab") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self._namespace(name), *command],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
            )


def both_ways(host: str, *others: str) -> list[tuple[str, str]]:
    """All directions between a host and others."""
    return [pair for other in others for pair in ((host, other), (other, host))]


@contextmanager
def hosts(*names: str) -> Iterator[Hosts]:
    """Hosts for as long as the block lasts."""
    made = Hosts(names)
    try:
        made.open()
        yield made
    finally:
        made.close()


def _up(link: str, address: str, *where: str) -> None:
    _ip(*where, "address", "add", f"{address}/24", "dev", link)
    _ip(*where, "link", "set", link, "mtu", MTU, "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class RelayedHosts:
    """Hosts that are none: all on loopback, each but the first behind relays to Redis and the gateway."""

    def __init__(self, names: Sequence[str], ports: Sequence[int]) -> None:
        self.names = list(names)
        self.ports = list(ports)
        count = len(ports)
        free = free_ports(count * (len(names) - 1))
        self._relayed = {name: free[count * n : count * (n + 1)] for n, name in enumerate(self.names[1:])}
        self._relay: subprocess.Popen[bytes] | None = None

    def address(self, name: str) -> str:
        """Its address."""
        assert name in self.names
        return "127.0.0.1"

    def open(self) -> None:
        """Start the relays."""
        pairs = [f"{a}:{b}" for relayed in self._relayed.values() for a, b in zip(relayed, self.ports, strict=True)]
        command = [sys.executable, "-m", "tests.netns.relay", *pairs]
        self._relay = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._relay.stdout is not None
        assert self._relay.stdout.readline() == b"ready\n"

    def close(self) -> None:
        """End the relays."""
        if self._relay is not None:
            with self._relay as relay:
                assert relay.stdin is not None
                relay.stdin.close()

    def cut(self, *directions: tuple[str, str]) -> None:
        """Lose all that goes from and to the first host of each pair; no pair mends everything."""
        count, cut = len(self.ports), {host for host, _ in directions}
        links = [i * count + j for i, name in enumerate(self._relayed) if name in cut for j in range(count)]
        assert self._relay is not None and self._relay.stdin is not None and self._relay.stdout is not None
        self._relay.stdin.write(json.dumps(links).encode() + b"\n")
        self._relay.stdin.flush()
        self._relay.stdout.readline()

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> "subprocess.Popen[bytes]":
        """Start a program on a host."""
        values = dict(environment)
        for own, port in zip(self._relayed.get(name, self.ports), self.ports, strict=True):
            values = {key: text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{own}") for key, text in values.items()}
        with log.open("ab") as output:
            return subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=values
            )


def free_ports(count: int) -> list[int]:
    """Find ports of loopback that nobody listens on."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextmanager
def relayed_hosts(*names: str, ports: Sequence[int]) -> Iterator[RelayedHosts]:
    """Hosts behind relays for as long as the block lasts."""
    made = RelayedHosts(names, ports)
    try:
        made.open()
        yield made
    finally:
        made.close()
