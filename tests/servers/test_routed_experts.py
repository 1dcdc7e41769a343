"""What a real SGLang server says of experts is of the tokens and layers that it is read as."""

from pathlib import Path

import pytest

from flotilla.services.rollout.engines.sglang.engine import SglangEngine
from flotilla.shared.schemas.routing import RoutingSizes
from tests.contract.engine.conftest import server_settings
from tests.contract.engine.models import save_model
from tests.contract.engine.requests import a_request
from tests.integration.engine.test_routed_experts import all_tokens, chosen_by, ids_of

pytestmark = [pytest.mark.anyio, pytest.mark.sglang, pytest.mark.timeout(900)]

WITH_MEMORY = Path(__file__).with_name("recording_on_cpu.py")


async def test_sglangs_record_is_of_the_same_tokens_and_layers(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = save_model("qwen3-moe", tmp_path / "model")
    settings = server_settings(tmp_path / "model", "sglang", records_experts=True)
    # Its build for CPUs asks CUDA for the record's memory.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {settings.python} {WITH_MEMORY} "$@"\n')
    python.chmod(0o700)
    engine = SglangEngine(server_settings(tmp_path / "model", "sglang", records_experts=True, python=python))
    request = a_request(tuple(range(10, 21)), seeds=(1, 2, 3), max_new_tokens=24)
    await engine.start()
    try:
        completions = await engine.generate(request)
    finally:
        await engine.close()

    for completion in completions:
        expected = chosen_by(model, all_tokens(request, completion))[:-1]
        assert completion.experts is not None
        assert completion.experts.sizes == RoutingSizes(2, 2, 8)
        assert ids_of(completion).shape == expected.shape
        # The first router reads what no expert has computed: those on a CPU are not exact in this build.
        assert ids_of(completion)[:, 0].tolist() == expected[:, 0].tolist()
