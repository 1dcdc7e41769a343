"""The command line and the environment of a vLLM server; pure functions."""

from collections.abc import Mapping

from flotilla.services.rollout.engines.servers.command import clean_environment, flags, plain_names
from flotilla.services.rollout.engines.servers.settings import ServerSettings
from flotilla.shared.config.sections.engine import OptionValue

MODULE = "vllm.entrypoints.launchers.api_server.entry"
SOCKET = "server.sock"
MAX_SOCKET_PATH = 100
"""A Unix socket's path has 107 bytes at most on Linux."""
GIB = 1 << 30

ON_CPU: Mapping[str, OptionValue] = {"enforce_eager": True, "kv_cache_memory_bytes": GIB}
"""What the server needs where it has no GPU, unless options say otherwise: it would take most of the memory."""


def command_line(settings: ServerSettings, *, context_tokens: int, logprobs_mode: str) -> list[str]:
    """Make the arguments behind the interpreter.

    Args:
        settings: of the engine.
        context_tokens: prompt and completion together, at most what the model can.
        logprobs_mode: which distribution the log-probabilities are of.
    """
    defaults: dict[str, OptionValue] = {"uvicorn_log_level": "warning", "disable_uvicorn_access_log": True}
    if settings.device == "cpu":
        defaults |= ON_CPU
    owned: dict[str, OptionValue] = {
        # Relative to its directory: a Unix socket's path is short, and whoever reaches it may do anything.
        "uds": SOCKET,
        "model": str(settings.model_path),
        "dtype": settings.dtype,
        "max_num_seqs": settings.slots,
        "max_model_len": context_tokens,
        "logprobs_mode": logprobs_mode,
        "skip_tokenizer_init": not settings.decodes,
        "enable_scale_out": True,
    }
    if settings.sleeps and settings.device != "cpu":
        # Its build for CPUs refuses the flag: it goes to sleep all the same, and keeps its memory.
        owned["enable_sleep_mode"] = True
    given = plain_names(settings.options)
    return ["-m", MODULE, *flags({**defaults, **given, **owned}, negates=True)]


def environment(settings: ServerSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """Make the server's environment of ours; it reports nothing to anybody."""
    kept = clean_environment(inherited)
    kept |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"}
    kept["VLLM_USE_RUST_FRONTEND"] = "0"
    given = plain_names(settings.options)
    if settings.device == "cpu":
        # Another pool that spins, or that is bound to cores which others use, makes both several times slower.
        kept |= {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": inherited.get("OMP_NUM_THREADS", "1")}
        kept.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if given.get("enforce_eager", True):
            kept["TORCHDYNAMO_DISABLE"] = "1"
    elif ":" in settings.device:
        first = int(settings.device.partition(":")[2])
        sizes = (given.get(f"{name}_parallel_size", 1) for name in ("tensor", "pipeline"))
        num = 1
        for size in sizes:
            num *= size if isinstance(size, int) else 1
        visible = inherited.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(index) for index in range(first + num)]
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(names[first : first + num])
    return kept
