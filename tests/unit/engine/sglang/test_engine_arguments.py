"""How an SGLang server is started: its command line and its environment."""

from pathlib import Path
from typing import Any

from flotilla.services.rollout.engines.servers.settings import ServerSettings
from flotilla.services.rollout.engines.sglang.engine import SglangDialect, command_line, environment

PLACE = Path("/tmp/flotilla-engine-1-abc")


def settings(**fields: Any) -> ServerSettings:
    return ServerSettings(**{"model_path": Path("/m"), "python": Path("/python"), **fields})


def words(**fields: Any) -> list[str]:
    return command_line(settings(**fields), port=7, key_file="/k", label="3-mark")


def value_of(name: str, arguments: list[str]) -> str:
    return arguments[arguments.index(name) + 1]


def test_what_follows_from_the_spec_is_said_to_the_server() -> None:
    arguments = words(slots=5, context_tokens=100, version=3, dtype="bfloat16", device="cuda:2")

    assert arguments[:2] == ["-m", "sglang.launch_server"]
    assert value_of("--max-running-requests", arguments) == "5"
    assert value_of("--context-length", arguments) == "108"
    assert value_of("--weight-version", arguments) == "3-mark"
    assert (value_of("--device", arguments), value_of("--base-gpu-id", arguments)) == ("cuda", "2")
    assert value_of("--dtype", arguments) == "bfloat16"
    assert "--skip-tokenizer-init" in arguments
    assert "--skip-tokenizer-init" not in words(decodes=True)


def test_options_are_flags_values_or_lists_and_beat_what_a_cpu_needs() -> None:
    options = {
        "attention_backend": "intel_amx",
        "tp-size": 2,
        "disable_radix_cache": True,
        "enable_metrics": False,
        "cuda_graph_bs_decode": (1, 2),
        "quantization": None,
    }

    arguments = words(options=options)

    assert value_of("--attention-backend", arguments) == "intel_amx"
    assert arguments.count("--attention-backend") == 1
    assert value_of("--tp-size", arguments) == "2"
    place = arguments.index("--cuda-graph-bs-decode")
    assert arguments[place + 1 : place + 3] == ["1", "2"]
    assert "--disable-radix-cache" in arguments
    assert not {"--enable-metrics", "--quantization"} & set(arguments)


def test_a_value_that_begins_with_a_dash_is_no_option_of_its_own() -> None:
    assert "--file-name=-x" in words(options={"file_name": "-x"})


def test_a_gpu_gets_none_of_what_a_cpu_needs() -> None:
    assert "--attention-backend" in words()
    assert not {"--attention-backend", "--max-total-tokens"} & set(words(device="cuda:0"))


def test_a_server_on_a_gpu_that_is_to_sleep_gets_the_saver_of_memory() -> None:
    assert "--enable-memory-saver" in words(device="cuda:0", sleeps=True)
    assert "--enable-memory-saver" not in words(device="cuda:0")
    assert "--enable-memory-saver" not in words(sleeps=True)


def test_the_server_gets_neither_our_packages_nor_our_secrets() -> None:
    ours = {"FLOTILLA_TOKEN": "secret", "PYTHONPATH": "/ours", "VIRTUAL_ENV": "/v", "HF_HOME": "/h", "PATH": "/bin"}

    theirs = environment(settings(), ours, PLACE)

    assert not {"FLOTILLA_TOKEN", "PYTHONPATH", "VIRTUAL_ENV"} & set(theirs)
    assert (theirs["HF_HOME"], theirs["PATH"]) == ("/h", "/bin")
    assert theirs["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "SGLANG_USE_CPU_ENGINE" not in environment(settings(device="cuda:0"), ours, PLACE)


def test_its_temporary_files_go_with_its_directory() -> None:
    theirs = environment(settings(), {"TMPDIR": "/elsewhere"}, PLACE)

    assert theirs["TMPDIR"] == str(PLACE)
    assert not theirs["TORCHINDUCTOR_CACHE_DIR"].startswith(str(PLACE))
    assert environment(settings(), {"TORCHINDUCTOR_CACHE_DIR": "/c"}, PLACE)["TORCHINDUCTOR_CACHE_DIR"] == "/c"


def test_sockets_have_short_paths() -> None:
    assert environment(settings(), {"TMPDIR": "/t"}, Path("/" + 95 * "x"))["TMPDIR"] == "/t"


def test_a_key_is_no_argument_for_the_server_to_misread() -> None:
    # Its file is read as if it were a command line, where a leading dash begins another argument.
    launches = [SglangDialect().launch(settings(), Path("/place"), 100, "3-mark") for _ in range(20)]

    assert all(launch.key is not None and launch.key.isalnum() for launch in launches)
    assert all(launch.files == {"server.yaml": f'api-key: "{launch.key}"\n'} for launch in launches)
    assert all(launch.key not in launch.arguments for launch in launches)
