"""How a vLLM server is started and asked, and how its replies are read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flotilla.services.rollout.engines.base import Prefix
from flotilla.services.rollout.engines.servers.completions import completion_of
from flotilla.services.rollout.engines.servers.settings import ServerSettings
from flotilla.services.rollout.engines.vllm.engine import (
    VllmDialect,
    command_line,
    environment,
    generate_body,
    metric_of,
    sampled_of,
)
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.schemas.trajectory import FinishReason
from tests.contract.engine.requests import a_request

BEGUN = Prefix((8, 9), (-0.5, -0.25), ((0, 3),))


def settings(**fields: Any) -> ServerSettings:
    return ServerSettings(**{"model_path": Path("/m"), "python": Path("/python"), **fields})


def words(mode: str = "processed_logprobs", **fields: Any) -> list[str]:
    return command_line(settings(**fields), context_tokens=100, logprobs_mode=mode)


def value_of(name: str, arguments: list[str]) -> str:
    return arguments[arguments.index(name) + 1]


def a_reply(tokens: tuple[int, ...] = (5, 6, 7), reason: str = "length", **changes: Any) -> dict[str, Any]:
    choice = {
        "finish_reason": reason,
        "token_ids": list(tokens),
        "logprobs": {"content": [{"token_id": token, "logprob": -0.1 * token} for token in tokens]},
        "weight_versions": [{"version": "3", "start": 0, "end": len(tokens)}],
    }
    return {"choices": [choice | changes]}


def test_what_follows_from_the_spec_is_said_to_the_server() -> None:
    arguments = words(slots=5, dtype="bfloat16")

    assert arguments[:2] == ["-m", "vllm.entrypoints.launchers.api_server.entry"]
    assert value_of("--model", arguments) == "/m"
    assert value_of("--max-num-seqs", arguments) == "5"
    assert value_of("--max-model-len", arguments) == "100"
    assert value_of("--dtype", arguments) == "bfloat16"
    assert value_of("--uds", arguments) == "server.sock"
    assert "--skip-tokenizer-init" in arguments
    assert "--no-skip-tokenizer-init" in words(decodes=True)


def test_it_can_lend_its_memory_where_it_is_asked_to_and_there_is_a_gpu() -> None:
    assert "--enable-sleep-mode" in words(sleeps=True, device="cuda:0")
    assert "--enable-sleep-mode" not in words(sleeps=True, device="cpu") + words(device="cuda:0")


def test_options_beat_what_a_cpu_needs_and_false_is_said() -> None:
    arguments = words(options={"enforce-eager": False, "kv_cache_memory_bytes": 7, "enable_prefix_caching": False})

    assert "--no-enforce-eager" in arguments and "--enforce-eager" not in arguments
    assert value_of("--kv-cache-memory-bytes", arguments) == "7"
    assert "--no-enable-prefix-caching" in arguments
    assert not {"--enforce-eager", "--kv-cache-memory-bytes"} & set(words(device="cuda:0"))


def test_the_server_gets_no_secret_of_ours_and_reports_to_nobody() -> None:
    theirs = environment(settings(), {"FLOTILLA_TOKEN": "secret", "PYTHONPATH": "/ours", "PATH": "/bin"})

    assert not {"FLOTILLA_TOKEN", "PYTHONPATH"} & set(theirs)
    assert (theirs["PATH"], theirs["VLLM_NO_USAGE_STATS"], theirs["VLLM_SERVER_DEV_MODE"]) == ("/bin", "1", "1")
    assert theirs["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in environment(settings(options={"enforce_eager": False}), {})


@pytest.mark.parametrize(
    ("visible", "options", "expected"),
    [(None, {}, "2"), (None, {"tensor-parallel-size": 2}, "2,3"), ("4,5,6,7", {"tensor_parallel_size": 2}, "6,7")],
)
def test_it_sees_the_devices_from_the_first_on(visible: str | None, options: dict[str, int], expected: str) -> None:
    inherited = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}

    theirs = environment(settings(device="cuda:2", options=options), inherited)

    assert theirs["CUDA_VISIBLE_DEVICES"] == expected
    assert "OMP_WAIT_POLICY" not in theirs


def test_a_directory_whose_socket_could_not_be_reached_is_refused() -> None:
    dialect = VllmDialect(raw=False)

    assert dialect.launch(settings(), Path("/tmp/place"), 100, "3-mark").socket == "server.sock"
    with pytest.raises(InvalidSpec, match="set TMPDIR"):
        dialect.launch(settings(), Path("/" + "long" * 30), 100, "3-mark")


def test_the_log_probs_are_before_all_cuts() -> None:
    uncut, cut = (VllmDialect(raw=raw).launch(settings(), Path("/p"), 100, "3-mark").arguments for raw in (False, True))

    assert value_of("--logprobs-mode", list(uncut)) == "processed_logprobs"
    assert value_of("--logprobs-mode", list(cut)) == "raw_logprobs"


def test_a_prefix_goes_behind_the_prompt_and_draws_other_random_numbers() -> None:
    request = a_request((1, 2), seeds=(7,), max_new_tokens=10, stop_token_ids=(4,))
    fresh, resumed = (generate_body(request, 0, prefix, "r", 7) for prefix in (None, BEGUN))

    assert resumed["token_ids"] == [1, 2, 8, 9]
    assert resumed["sampling_params"]["max_tokens"] == 8
    assert resumed["sampling_params"]["stop_token_ids"] == [4]
    assert resumed["cache_salt"] == "7"
    assert fresh["sampling_params"]["seed"] == 7
    assert 0 <= resumed["sampling_params"]["seed"] < 2**63 and resumed["sampling_params"]["seed"] != 7


def test_greedy_is_temperature_zero_over_all_tokens() -> None:
    request = a_request(greedy=True, temperature=0.3, top_p=0.5, top_k=3, min_p=0.2)
    params = generate_body(request, 0, None, "r", 0)["sampling_params"]

    assert (params["temperature"], params["top_k"], params["top_p"]) == (0.0, 0, 1.0)
    assert "min_p" not in params


def test_min_p_and_the_repetition_penalty_go_under_their_names() -> None:
    request = a_request(min_p=0.2, repetition_penalty=1.3)
    params = generate_body(request, 0, None, "r", 0)["sampling_params"]

    assert (params["min_p"], params["repetition_penalty"]) == (0.2, 1.3)


def test_tokens_of_a_prefix_keep_their_log_probs_and_versions() -> None:
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]

    completion = completion_of(sampled_of, a_reply(weight_versions=spans), a_request(), 0, BEGUN, int, vocab_size=96)

    assert completion.token_ids.tolist() == [8, 9, 5, 6, 7]
    np.testing.assert_allclose(completion.log_probs, [-0.5, -0.25, -0.5, -0.6, -0.7], atol=1e-6)
    assert completion.versions == ((0, 3), (3, 4))


def test_an_abort_before_the_first_token_gives_what_the_request_came_with() -> None:
    reply = a_reply((), "abort", weight_versions=[])

    assert completion_of(sampled_of, reply, a_request(), 0, None, int, vocab_size=96).token_ids.size == 0
    kept = completion_of(sampled_of, reply, a_request(prefixes=[BEGUN]), 0, BEGUN, int, vocab_size=96)
    assert (kept.token_ids.tolist(), kept.finish_reason) == ([8, 9], FinishReason.ABORTED)


@pytest.mark.parametrize(
    "reply",
    [
        {"choices": []},
        a_reply(logprobs=None),
        a_reply(logprobs={"content": [{"token_id": token, "logprob": -9999.0} for token in (5, 6, 7)]}),
        a_reply(weight_versions=None),
        a_reply(weight_versions=[{"version": "3", "end": 3}]),
        a_reply(weight_versions=[{"version": "3", "start": 0, "end": None}]),
        a_reply(weight_versions=["3"]),
        {"choices": [None]},
        a_reply(logprobs=[0.1]),
        a_reply(weight_versions=[{"version": "default", "start": 0, "end": 3}]),
        a_reply(finish_reason="error"),
        a_reply((5, 96, 7)),
        a_reply((5,) * 9),
    ],
)
def test_a_reply_that_contradicts_itself_is_not_used(reply: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"reply|belong|finite|spans|invalid literal|unpack|vocabulary|at most"):
        completion_of(sampled_of, reply, a_request(), 0, None, int, vocab_size=96)


def test_a_metric_is_added_up_over_its_labels() -> None:
    page = '# HELP a:b x\na:b{engine="0"} 2.0\na:b{engine="1"} 3.0\na:b_total 7.0\na:c{x="y"} 1e2\n'

    assert [metric_of(page, name) for name in ("a:b", "a:b_total", "a:c", "a:d")] == [5, 7, 100, 0]
