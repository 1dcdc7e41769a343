"""The command line and the environment of an SGLang server; pure functions."""

from collections.abc import Mapping

from services.rollout.engines.sglang.settings import MARGIN_TOKENS, SglangSettings
from shared.config.engine import Options, OptionValue

MODULE = "sglang.launch_server"
HOST = "127.0.0.1"

ON_CPU: Mapping[str, OptionValue] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mem_fraction_static": 0.2,
}
"""What the server needs where it has no GPU, unless options say otherwise."""
FORBIDDEN_PREFIXES = ("FLOTILLA_", "PYTHON", "VIRTUAL_ENV")
"""Of our variables: packages of two environments must not meet, and a server needs no secrets of the fleet."""


def command_line(settings: SglangSettings, *, port: int, key_file: str) -> list[str]:
    """Make the arguments behind the interpreter.

    Args:
        settings: of the engine.
        port: that the server listens on.
        key_file: YAML file with the server's key, which a command line would show to everybody on the machine.
    """
    defaults: dict[str, OptionValue] = {"log_level_http": "warning", "skip_server_warmup": True}
    if settings.device == "cpu":
        defaults |= {**ON_CPU, "max_total_tokens": settings.slots * (settings.context_tokens + MARGIN_TOKENS)}
    given = {name.lstrip("-").replace("-", "_"): value for name, value in (settings.options or {}).items()}
    owned: dict[str, OptionValue] = {
        "model_path": str(settings.model_path),
        "host": HOST,
        "port": port,
        "config": key_file,
        "dtype": settings.dtype,
        "device": settings.device.partition(":")[0],
        "max_running_requests": settings.slots,
        "context_length": settings.context_tokens + MARGIN_TOKENS,
        "weight_version": str(settings.version),
        "skip_tokenizer_init": not settings.decodes,
    }
    if ":" in settings.device:
        owned["base_gpu_id"] = int(settings.device.partition(":")[2])
    return ["-m", MODULE, *flags({**defaults, **given, **owned})]


def flags(options: Options) -> list[str]:
    """Write options as a command line: true is a bare flag, false and null are none at all."""
    words: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, tuple | list):
            words += [flag, *(str(item) for item in value)]
        elif value is True:
            words.append(flag)
        else:
            words += [f"{flag}={value}"] if str(value).startswith("-") else [flag, str(value)]
    return words


def environment(settings: SglangSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """Make the server's environment of ours: nothing of our packages, nothing of the fleet's secrets."""
    kept = {name: value for name, value in inherited.items() if not name.startswith(FORBIDDEN_PREFIXES)}
    # The Rust server is another program; a context a little longer than the model's holds what SGLang keeps for itself.
    kept |= {"SGLANG_RUST_SERVER": "0", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1", "PYTHONUNBUFFERED": "1"}
    if settings.device == "cpu":
        # A second thread pool that spins makes both several times slower, so idle threads sleep.
        on_cpu = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
        kept |= on_cpu | {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": inherited.get("OMP_NUM_THREADS", "1")}
    return kept
