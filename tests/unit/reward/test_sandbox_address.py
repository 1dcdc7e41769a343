"""Code waits for a sandbox: that the fleet has none now, or that the gateway does not answer, ends no experiment."""

from typing import Any

import pytest

from flotilla.services.reward.state import SessionOpener
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.environment.settings import ServiceSettings
from flotilla.shared.errors import DeadlineExceeded, FlotillaError, Unavailable
from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.schemas.service import Assignment

SPEC = {
    "name": "trial",
    "model": {"path": "model"},
    "data": {"path": "train.jsonl", "label_column": "tests"},
    "reward": {"components": [{"kind": "code"}]},
    "optimisation": {"steps": 3},
}
MINE = Credentials("t")
SETTINGS = ServiceSettings(gateway_url="http://gateway", token="t" * 16, redis_url="redis://nowhere")


class ScriptedGateway:
    def __init__(self, refusal: FlotillaError | None) -> None:
        self.refusal = refusal

    async def call(self, method: str, path: str, **_: Any) -> dict[str, Any]:
        if self.refusal is not None:
            raise self.refusal
        return {"items": [], "next": None}


@pytest.mark.parametrize("refusal", [None, Unavailable("away"), DeadlineExceeded("slow")])
async def test_no_sandbox_now_is_a_passing_reason(refusal: FlotillaError | None) -> None:
    opener = SessionOpener(
        redis=None, client=ScriptedGateway(refusal), settings=SETTINGS, credentials=MINE, holder="reward"
    )  # type: ignore[arg-type]
    spec = ExperimentSpec.model_validate(SPEC)
    assignment = Assignment(experiment_id="e1", revision=1, spec=SPEC, directory="/data")

    with pytest.raises(FlotillaError) as caught:
        await opener(spec, assignment)

    assert caught.value.retryable
