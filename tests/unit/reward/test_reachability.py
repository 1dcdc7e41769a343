"""A server that is asked in vain is named from the first failure until it answers."""

import httpx
import pytest

from flotilla.services.reward.remote import RemoteVerifier
from flotilla.services.reward.verifiers.base import AsksServer, Verifier
from flotilla.services.reward.verifiers.code import CodeVerifier
from flotilla.services.reward.verifiers.judge import JudgeVerifier
from flotilla.services.reward.verifiers.registry import CombinedVerifier
from flotilla.shared.config.sections.judge import JudgeConfig
from flotilla.shared.config.sections.reward import CodeConfig, RemoteConfig
from flotilla.shared.schemas.service import GRADER, JUDGE, SANDBOX
from tests.unit.reward.builders import a_sample

ADDRESS = "http://93.184.216.34"
PROGRAM = a_sample("```python\nprint(1)\n```", '{"inputs": [""], "outputs": ["1\\n"]}')


class Server:
    """Answers each request by what is next; whoever has asked before sees the problem of that time."""

    def __init__(self, answers: list[httpx.Response | Exception]) -> None:
        self.answers = answers
        self.verifier: Verifier | None = None
        self.problems: list[str | None] = []

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.problems.append(self.problem)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def problem(self) -> str | None:
        assert isinstance(self.verifier, AsksServer)
        found = self.verifier.problem
        return None if found is None else f"{found.component}: {found.cause}"


def a_verifier(component: str, client: httpx.AsyncClient) -> tuple[Verifier, str]:
    if component == GRADER:
        config = RemoteConfig(url=f"{ADDRESS}/grade?key=secret")
        return RemoteVerifier(config, "e", client, backoff_seconds=0), f"{ADDRESS}/grade: the grader"
    if component == JUDGE:
        judge = JudgeConfig(kind="judge", url=f"{ADDRESS}/v1", model="m", template="{response}", pattern=r"(\d+)")
        return JudgeVerifier(judge, client, backoff_seconds=0), f"{ADDRESS}/v1/chat/completions: the judge"
    return CodeVerifier(CodeConfig(), client, ADDRESS, None, backoff_seconds=0), f"{ADDRESS}/run_code: the sandbox"


GOOD = {
    GRADER: {"grades": [{"reward": 1.0}]},
    JUDGE: {"choices": [{"message": {"content": "10"}}]},
    SANDBOX: {"status": "Success", "message": "", "run_result": {"status": "Finished", "stdout": "1\n"}},
}


@pytest.mark.parametrize("component", [GRADER, JUDGE, SANDBOX])
async def test_it_is_named_at_the_first_failure_until_it_answers(component: str) -> None:
    refused = httpx.ConnectError("All connection attempts failed")
    server = Server([refused, httpx.Response(503, text="later"), httpx.Response(200, json=GOOD[component])])
    verifier, said = a_verifier(component, httpx.AsyncClient(transport=httpx.MockTransport(server.handle)))
    server.verifier = CombinedVerifier([(CodeConfig(), verifier)])

    (grade,) = await verifier.score([PROGRAM])

    assert grade.reward == 1.0
    assert server.problems[0] is None and server.problem is None
    assert str(server.problems[1]).startswith(f"{component}: {said} does not answer: ConnectError('All conn")
    assert str(server.problems[2]).startswith(f"{component}: {said} answered 503")


@pytest.mark.parametrize("component", [GRADER, JUDGE, SANDBOX])
async def test_it_stays_named_after_it_was_given_up(component: str) -> None:
    server = Server([httpx.ConnectError("refused")] * 4)
    server.verifier, _ = a_verifier(component, httpx.AsyncClient(transport=httpx.MockTransport(server.handle)))

    (grade,) = await server.verifier.score([PROGRAM])

    assert grade.reward is None
    assert str(server.problem).startswith(component)


@pytest.mark.parametrize("component", [GRADER, JUDGE, SANDBOX])
@pytest.mark.parametrize("status", [400, 429])
async def test_a_server_that_refuses_or_asks_for_a_pause_is_reached(component: str, status: int) -> None:
    server = Server([httpx.ConnectError("refused"), *[httpx.Response(status, text="no")] * 4])
    server.verifier, _ = a_verifier(component, httpx.AsyncClient(transport=httpx.MockTransport(server.handle)))

    await server.verifier.score([PROGRAM])

    assert server.problems[1] is not None and server.problem is None


async def test_one_of_several_servers_is_named_while_another_answers() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.headers["Host"] == "93.184.216.35":
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json=GOOD[GRADER])

    urls = [{"url": f"{ADDRESS}/grade"}, {"url": "http://93.184.216.35/grade", "weight": 1e9}]
    config = RemoteConfig.model_validate({"urls": urls})
    client = httpx.AsyncClient(transport=httpx.MockTransport(handle))
    verifier = RemoteVerifier(config, "e", client, backoff_seconds=0)

    (grade,) = await verifier.score([PROGRAM])

    assert grade.reward == 1.0
    assert verifier.problem is not None and verifier.problem.cause.startswith("http://93.184.216.35/grade: ")


async def test_an_address_that_is_not_allowed_is_named() -> None:
    client = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(200)))
    verifier = RemoteVerifier(RemoteConfig(url="http://10.1.2.3/grade"), "e", client, backoff_seconds=0)

    await verifier.score([PROGRAM])

    assert verifier.problem is not None and "10.1.2.3" in verifier.problem.cause
