"""What an engine behind a server needs to start: its settings, command line and environment."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flotilla.shared.config.sections.engine import Options
from flotilla.shared.config.sections.images import ImagesConfig
from flotilla.shared.environment.settings import LOOPBACK, IPNetwork


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """Adapters that a server adds to its weights itself.

    Attributes:
        name: that their names at the server begin with.
        rank: of all of them.
    """

    name: str
    rank: int


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How the server runs, or where it runs already.

    Attributes:
        model_path: a Hugging Face model directory.
        python: interpreter that has the server; None if the server is not ours to start.
        url: where the server listens already; None if it is ours to start.
        version: the policy version of the weights in ``model_path``.
        dtype: of weights, activations and KV cache.
        device: "cpu", or a CUDA device such as "cuda:0".
        slots: completions sampled at a time.
        context_tokens: prompt and completion together.
        decodes: whether stop strings are wanted, for which the server needs the model's tokenizer.
        options: further server arguments.
        sleeps: whether it lends its memory at times, for which a server may have to be started so.
        start_seconds: deadline of ``start``.
        load_seconds: deadline of loading weights.
        call_seconds: deadline of any other call that waits for no sampling.
        close_seconds: how long ``close`` waits before it kills the server.
        networks: that are not public, and that ``url`` may lead to.
        group_host: address of this host that the server's own connections to other members of a weight group, or to
            its other ranks, may be at; None leaves the choice to the server.
        records_experts: record which experts the routers of a mixture choose for each token.
        probe_seconds: between two health checks of the server; three failures count as its death.
        adapters: that images hold alone; None: they hold whole weights.
        images: that prompts have; None: prompts are text.
    """

    model_path: Path
    python: Path | None = None
    url: str | None = None
    version: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    slots: int = 128
    context_tokens: int = 2048
    decodes: bool = False
    options: Options | None = None
    sleeps: bool = False
    start_seconds: float = 600.0
    load_seconds: float = 120.0
    call_seconds: float = 30.0
    close_seconds: float = 10.0
    networks: tuple[IPNetwork, ...] = LOOPBACK
    group_host: str | None = None
    records_experts: bool = False
    probe_seconds: float = 10.0
    adapters: AdapterSettings | None = None
    images: ImagesConfig | None = None

    def __post_init__(self) -> None:
        if self.python is None and self.url is None:
            raise ValueError("an engine needs an interpreter to start a server with, or the URL of one")


HOST = "127.0.0.1"
FORBIDDEN_PREFIXES = ("FLOTILLA_", "PYTHON", "VIRTUAL_ENV")
"""Of our variables: packages of two environments must not meet, and a server needs no secrets of the fleet."""


def flags(options: Options, *, negates: bool) -> list[str]:
    """Write options as a command line: true is a bare flag, null is none at all.

    Args:
        options: values by name.
        negates: whether false is the flag ``--no-NAME``; else it is none at all.
    """
    words: list[str] = []
    for name, value in options.items():
        if value is None or (value is False and not negates):
            continue
        flag = f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
        if isinstance(value, tuple | list):
            words += [flag, *(str(item) for item in value)]
        elif isinstance(value, bool):
            words.append(flag)
        else:
            words += [f"{flag}={value}"] if str(value).startswith("-") else [flag, str(value)]
    return words


def plain_names(options: Options | None) -> Options:
    """Write the names of options as Python does."""
    return {name.lstrip("-").replace("-", "_"): value for name, value in (options or {}).items()}


def clean_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Make a server's environment from ours, without our packages and the fleet's secrets."""
    kept = {name: value for name, value in inherited.items() if not name.startswith(FORBIDDEN_PREFIXES)}
    return kept | {"PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    """Find a free port."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
