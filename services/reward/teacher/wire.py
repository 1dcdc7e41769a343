"""What goes to a teacher's server and what comes back, by kind of server; pure functions.

Log-probabilities of given tokens are at temperature 1 on all of them, whatever the request says of sampling.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from flotilla.shared.config.sections.distillation import TeacherServerConfig
from flotilla.shared.errors import GradingFailed
from flotilla.shared.net.client.bounded_json import parse_json

Body = dict[str, Any]

BYTES_OF_AN_ANSWER: Final = 64 * 1024
BYTES_PER_TOKEN: Final = 1024
"""vLLM writes some hundred bytes for each."""
VALUES_OF_AN_ANSWER: Final = 2000
VALUES_PER_TOKEN: Final = 32
NO_LOG_PROB: Final = -9000.0
"""Below it is no number: vLLM writes -9999 in place of minus infinity."""
ROUNDING: Final = 1e-3
"""A log-probability may be so much above 0, in nats: servers compute in bfloat16."""


def score_request(config: TeacherServerConfig, token_ids: Sequence[int], start: int) -> tuple[str, Body]:
    """Make the path and the body that ask for the log-probs of the tokens from ``start`` on, which is at least 1."""
    ids = list(token_ids)
    if config.kind == "sglang":
        # The first entry of the answer has no value: it is asked for the one before.
        sampling = {"max_new_tokens": 0, "temperature": 1.0}
        asked = {"return_logprob": True, "logprob_start_len": start - 1}
        return "/generate", {"input_ids": ids, "sampling_params": sampling, **asked}
    body: Body = {} if config.model is None else {"model": config.model}
    body |= {"prompt": ids, "max_tokens": 1, "temperature": 1.0}
    return "/v1/completions", body | (
        {"prompt_logprobs": 0} if config.kind == "vllm" else {"echo": True, "logprobs": 1}
    )


def most_bytes(num_tokens: int) -> int:
    """Bound an answer about so many tokens."""
    return BYTES_OF_AN_ANSWER + BYTES_PER_TOKEN * num_tokens


def read_answer(content: bytes, num_tokens: int) -> object:
    """Parse an answer about so many tokens; whole numbers become floats.

    Raises:
        GradingFailed: it is not JSON, or has too many values or levels.
    """
    try:
        return parse_json(content, max_values=VALUES_OF_AN_ANSWER + VALUES_PER_TOKEN * num_tokens)
    except ValueError as error:
        raise GradingFailed(f"the teacher's answer {error}") from None


def log_probs_of(config: TeacherServerConfig, answer: object, token_ids: Sequence[int], start: int) -> list[float]:
    """Read the log-probs [len(token_ids) - start], in nats, of the tokens from ``start`` on.

    Raises:
        GradingFailed: the answer is not as expected, is about other tokens, or holds what is no log-probability.
    """
    wanted = list(token_ids[start:])
    try:
        pairs = _READERS[config.kind](answer, token_ids, start)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise GradingFailed(f"the teacher's answer is not as kind {config.kind} gives it: {error!r}"[:300]) from None
    if len(pairs) != len(wanted):
        raise GradingFailed(f"the teacher's answer has {len(pairs)} log-probabilities for {len(wanted)} tokens")
    found: list[float] = []
    for place, ((token, value), token_id) in enumerate(zip(pairs, wanted, strict=True), start=start):
        if token is not None and token != token_id:
            raise GradingFailed(
                f"the teacher's answer has token {token!r} at position {place}, which is {token_id}"[:300]
            )
        if not isinstance(value, float) or not math.isfinite(value) or not NO_LOG_PROB < value <= ROUNDING:
            given = repr(value)[:40] if isinstance(value, float) else f"a {type(value).__name__}"
            raise GradingFailed(f"the teacher's log-probability at position {place} is none: {given}")
        found.append(value)
    return found


_Pairs = list[tuple[object, object]]
"""Of each token its id, None where the server does not tell it, and its log-probability."""


def _of_sglang(answer: Any, token_ids: Sequence[int], start: int) -> _Pairs:
    entries = answer["meta_info"]["input_token_logprobs"]
    return [(entry[1], entry[0]) for entry in entries[1:]]


def _of_vllm(answer: Any, token_ids: Sequence[int], start: int) -> _Pairs:
    entries = answer["choices"][0]["prompt_logprobs"]
    if len(entries) != len(token_ids):
        raise ValueError(f"{len(entries)} entries for {len(token_ids)} tokens")
    # Keys are token ids in decimal digits; there may be likelier tokens beside the given one.
    return [
        (None, entry[str(token_id)]["logprob"])
        for entry, token_id in zip(entries[start:], token_ids[start:], strict=True)
    ]


def _of_openai(answer: Any, token_ids: Sequence[int], start: int) -> _Pairs:
    values = answer["choices"][0]["logprobs"]["token_logprobs"]
    if len(values) - len(token_ids) not in {0, 1}:
        raise ValueError(f"{len(values)} entries for {len(token_ids)} tokens, and at most one sampled")
    return [(None, value) for value in values[start : len(token_ids)]]


_READERS = {"sglang": _of_sglang, "vllm": _of_vllm, "openai": _of_openai}


def text_of(answer: object) -> str | None:
    """Read what ``/detokenize`` answers: SGLang calls it text, vLLM prompt; None if it says neither."""
    if not isinstance(answer, Mapping):
        return None
    found = answer.get("text", answer.get("prompt"))
    return found if isinstance(found, str) else None


def reads_alike(theirs: str, ours: str) -> bool:
    """Tell whether two decodings are of the same tokens; special tokens, white space and cut characters are left out.

    Args:
        theirs: the teacher's, perhaps with special tokens.
        ours: the rollout's, without, and perhaps cut where a stop string was found.
    """
    return _bare(ours) in _bare(theirs)


def _bare(text: str) -> str:
    return "".join(character for character in text if not character.isspace() and character != "\ufffd")
