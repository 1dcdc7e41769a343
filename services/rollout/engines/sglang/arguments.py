"""The command line and the environment of an SGLang server; pure functions."""

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import gettempdir

import psutil

from flotilla.services.rollout.engines.servers.command import HOST, clean_environment, flags, plain_names
from flotilla.services.rollout.engines.servers.settings import ServerSettings
from flotilla.shared.config.sections.engine import OptionValue

MODULE = "sglang.launch_server"
MARGIN_TOKENS = 8
"""SGLang keeps up to six positions of its context for itself, and cuts a completion short that would need them."""
KEY_FILE = "server.yaml"
SHARED_MEMORY = ("sglang_loads_", "sgl_shm_")
MAX_PLACE = 90
"""A Unix socket's path has 107 bytes at most on Linux."""

ON_CPU: Mapping[str, OptionValue] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mem_fraction_static": 0.2,
}
"""What the server needs where it has no GPU, unless options say otherwise."""


def command_line(settings: ServerSettings, *, port: int, key_file: str, label: str) -> list[str]:
    """Make the arguments behind the interpreter.

    Args:
        settings: of the engine.
        port: that the server listens on.
        key_file: YAML file with the server's key, which a command line would show to everybody on the machine.
        label: of its weights.
    """
    defaults: dict[str, OptionValue] = {"log_level_http": "warning", "skip_server_warmup": True}
    if settings.device == "cpu":
        defaults |= {**ON_CPU, "max_total_tokens": settings.slots * (settings.context_tokens + MARGIN_TOKENS)}
    owned: dict[str, OptionValue] = {
        "model_path": str(settings.model_path),
        "host": HOST,
        "port": port,
        "config": key_file,
        "dtype": settings.dtype,
        "device": settings.device.partition(":")[0],
        "max_running_requests": settings.slots,
        "context_length": settings.context_tokens + MARGIN_TOKENS,
        "weight_version": label,
        "skip_tokenizer_init": not settings.decodes,
    }
    if settings.sleeps and settings.device != "cpu":
        # On a CPU it frees nothing, with the flag or without.
        owned["enable_memory_saver"] = True
    if ":" in settings.device:
        owned["base_gpu_id"] = int(settings.device.partition(":")[2])
    return ["-m", MODULE, *flags({**defaults, **plain_names(settings.options), **owned}, negates=False)]


def environment(settings: ServerSettings, inherited: Mapping[str, str], place: Path) -> dict[str, str]:
    """Make the server's environment of ours; its temporary files are in its own directory, and go with it."""
    kept = clean_environment(inherited)
    if len(os.fsencode(place)) <= MAX_PLACE:
        # Each start leaves five of them, most of them sockets. What torch has compiled is for all.
        kept.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{gettempdir()}/torchinductor_{os.getuid()}")
        kept["TMPDIR"] = str(place)
    # The Rust server is another program; a context a little longer than the model's holds what SGLang keeps for itself.
    kept |= {"SGLANG_RUST_SERVER": "0", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    if settings.device == "cpu":
        # A second thread pool that spins makes both several times slower, so idle threads sleep.
        on_cpu = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
        kept |= on_cpu | {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": inherited.get("OMP_NUM_THREADS", "1")}
    interface = None if settings.group_host is None else interface_of(settings.group_host)
    if interface is not None:
        # Else gloo listens where the machine's name leads, and nccl on the first interface.
        kept |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return kept


def interface_of(address: str) -> str | None:
    """Name the network interface that has an address of this machine; None if none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in {each.address.partition("%")[0] for each in addresses}:
            return name
    return None
