"""A switch between network namespaces, in a process: ``python -m tests.netns.switch NAME...`` (root).

It makes a TAP device of each name, which its owner moves into a namespace, and forwards frames between them. A line of
JSON on standard input replaces the rules: ``[{"from": i, "to": j, "drop": true, "delay": 0.1, "loss": 0.01}, ...]``, by
position of the names; whatever no rule names passes at once. Kernels without netem and filters have nothing else.
"""

import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
FRAME_BYTES = 1 << 16
BROADCAST = 1
"""The lowest bit of a frame's first byte: it is for several."""


def open_tap(name: str) -> int:
    """Make a TAP device, and return what its frames are read from and written to."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


class Switch:
    """Forwards frames by the rules at hand."""

    def __init__(self, devices: list[int]) -> None:
        self._devices = devices
        self._rules: dict[tuple[int, int], dict[str, float]] = {}
        self._places: dict[bytes, int] = {}
        self._delayed: list[tuple[float, int, int, bytes]] = []
        self._count = 0

    def run(self) -> None:
        """Forward until standard input ends."""
        commands = sys.stdin.fileno()
        rest = b""
        while True:
            left = max(0.0, self._delayed[0][0] - time.monotonic()) if self._delayed else None
            ready, _, _ = select.select([commands, *self._devices], [], [], left)
            if commands in ready:
                data = os.read(commands, FRAME_BYTES)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._rules = {(rule["from"], rule["to"]): rule for rule in json.loads(line)}
                    sys.stdout.write("\n")
                    sys.stdout.flush()
            for source, device in enumerate(self._devices):
                if device in ready:
                    try:
                        frame = os.read(device, FRAME_BYTES)
                    except OSError:
                        return  # its namespace was removed: so are all of them
                    self._forward(source, frame)
            while self._delayed and self._delayed[0][0] <= time.monotonic():
                _, _, target, frame = heapq.heappop(self._delayed)
                self._write(target, frame)

    def _forward(self, source: int, frame: bytes) -> None:
        self._places[frame[6:12]] = source
        known = None if frame[0] & BROADCAST else self._places.get(frame[:6])
        targets = range(len(self._devices)) if known is None else [known]
        for target in targets:
            rule = self._rules.get((source, target), {})
            if target == source or rule.get("drop") or random.random() < rule.get("loss", 0.0):
                continue
            if rule.get("delay"):
                self._count += 1
                heapq.heappush(self._delayed, (time.monotonic() + rule["delay"], self._count, target, frame))
            else:
                self._write(target, frame)

    def _write(self, target: int, frame: bytes) -> None:
        try:
            os.write(self._devices[target], frame)
        except OSError:
            return  # the device is down, or its queue is full: a frame is lost, as on a wire


def main() -> None:
    """Make the devices, say so, forward."""
    devices = [open_tap(name) for name in sys.argv[1:]]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    Switch(devices).run()


if __name__ == "__main__":
    main()
