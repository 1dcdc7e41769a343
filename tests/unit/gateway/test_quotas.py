"""What one token may have at a time, and what it is told when it wants more."""

from typing import Any

import pytest

from flotilla.services.gateway.access.caller import caller
from flotilla.services.gateway.access.quotas import UNLIMITED, check_episodes
from flotilla.services.gateway.access.tokens import Tokens
from flotilla.services.gateway.episodes.episodes import HandedOutEpisodes
from flotilla.services.gateway.lifecycle.states import Action
from flotilla.services.gateway.settings import read_quota
from flotilla.services.gateway.state import GatewayState
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.shared.clock import ManualClock
from flotilla.shared.errors import InvalidRequest, QuotaExceeded
from flotilla.shared.net.authorisation.access import Principal, Scope
from flotilla.shared.net.authorisation.token_records import Quota, TokenRequest
from flotilla.shared.schemas.experiment import ExperimentState
from tests.unit.gateway.builders import a_gateway, a_record, a_spec

CI = Principal(Scope.OPERATOR, "ci")
OTHER = Principal(Scope.OPERATOR, "other")
MEBIBYTE = 2**20


async def add(gateway: GatewayState, experiment_id: str, **changes: Any) -> None:
    """Add an experiment as whoever is the caller."""
    record = a_record(experiment_id, **changes)
    await gateway.repository.add(record, a_spec())


@pytest.fixture(autouse=True)
def _as_ci() -> Any:
    token = caller.set(CI)
    yield
    caller.reset(token)


async def test_a_token_has_as_many_experiments_as_it_may_and_others_are_not_counted() -> None:
    gateway = a_gateway(quota=Quota(experiments=2))
    await add(gateway, "a")
    await add(gateway, "b")
    caller.set(OTHER)
    await add(gateway, "c")
    caller.set(CI)

    with pytest.raises(
        QuotaExceeded, match="the quota of operator ci for experiments is 2, of which 2 are used"
    ) as found:
        await add(gateway, "d")

    assert found.value.status == 429
    assert found.value.context == {"quota": "experiments", "used": 2, "wanted": 1, "allowed": 2}
    assert {each.id for each in gateway.repository} == {"a", "b", "c"}
    assert (await gateway.store.experiments())[0].created_by == "operator ci"


async def test_deleting_one_makes_room() -> None:
    gateway = a_gateway(quota=Quota(experiments=1))
    await add(gateway, "a")
    await gateway.commands.act("a", Action.DELETE)

    await add(gateway, "b")


async def test_samples_count_as_what_the_specs_let_them_take() -> None:
    gateway = a_gateway(quota=Quota(sample_bytes=3 * MEBIBYTE))
    kept = a_spec(samples={"max_bytes": 2 * MEBIBYTE}).model_dump(mode="json")
    await add(gateway, "a", spec=kept)

    with pytest.raises(QuotaExceeded, match=r"sample_bytes is 3145728, of which 2097152 are used, and 2097152 more"):
        await add(gateway, "b", spec=kept)


async def test_a_token_has_as_many_at_work_as_it_may_whoever_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = a_gateway(quota=Quota(running=1))
    await add(gateway, "a", state=ExperimentState.PAUSED)
    await add(gateway, "b")

    async def nothing(*_: Any) -> None:
        return

    monkeypatch.setattr(gateway.commands, "_check_start", nothing)
    caller.set(OTHER)
    with pytest.raises(QuotaExceeded, match="for running is 1, of which 1 are used: wait until one has ended"):
        await gateway.commands.act("b", Action.START)
    assert gateway.repository.get("b").state is ExperimentState.DRAFT

    await add(gateway, "c")
    await gateway.commands.act("c", Action.START)
    assert gateway.repository.get("c").state is ExperimentState.STARTING


async def test_a_token_has_its_own_quota_or_that_of_the_settings() -> None:
    tokens = Tokens(MemoryStore(), ManualClock(), "t", quota=Quota(experiments=5))
    await tokens.create(TokenRequest(name="ci", scope=Scope.OPERATOR, quota=Quota(experiments=7)))
    await tokens.create(TokenRequest(name="other", scope=Scope.OPERATOR))

    found = {whose: tokens.quota_of(whose) for whose in ("operator ci", "operator other", "operator", "gateway", None)}

    assert [each.experiments for each in found.values()] == [7, 5, 5, None, None]


def test_episodes_count_until_they_end_or_their_time_is_over() -> None:
    handed = HandedOutEpisodes()
    handed.add("agent a", "1", until=10.0)
    handed.add("agent a", "2", until=20.0)

    with handed.beginning("agent a"):
        assert handed.count("agent a", now=5.0) == 3
    handed.end("2")
    assert (handed.count("agent a", now=5.0), handed.count("agent a", now=10.0)) == (1, 0)
    with pytest.raises(QuotaExceeded, match="of agent a for episodes is 1, of which 1 are used: complete some"):
        check_episodes(1, Quota(episodes=1), "agent a")
    check_episodes(10**9, UNLIMITED, "agent a")


def test_the_settings_name_numbers_or_none() -> None:
    assert read_quota({}) == Quota()
    found = read_quota({"FLOTILLA_QUOTA_EXPERIMENTS": "3", "FLOTILLA_QUOTA_EPISODES": "none"})
    assert found == Quota(experiments=3, episodes=None)
    with pytest.raises(InvalidRequest, match="FLOTILLA_QUOTA_RUNNING must be a whole number, or none"):
        read_quota({"FLOTILLA_QUOTA_RUNNING": "-1"})


def test_a_quota_of_a_scope_that_has_nothing_to_count_is_refused() -> None:
    with pytest.raises(ValueError, match="quota has no effect with the scope reader"):
        TokenRequest(name="r", scope=Scope.READER, quota=Quota())
