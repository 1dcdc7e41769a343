"""Who a token stands for, and what each scope may do."""

import base64
import json

import pytest

from flotilla.services.gateway.access.policy import RULES, refusal
from flotilla.services.gateway.access.tokens import PASS_SECONDS, Tokens
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.shared.clock import ManualClock
from flotilla.shared.errors import Conflict, NotFound
from flotilla.shared.net.authorisation.access import PASS_PREFIX, PassKey, Principal, Scope
from flotilla.shared.net.authorisation.token_records import TokenRequest
from flotilla.shared.schemas.service import ServiceKind

ROLLOUT = Principal(Scope.SERVICE, "rollout-1", ServiceKind.ROLLOUT, "rollout-1")
TRAINER = Principal(Scope.SERVICE, "trainer-1", ServiceKind.TRAINER, "trainer-1")
ASSIGNED = Principal(Scope.SERVICE, "trainer-1", ServiceKind.TRAINER, "trainer-1", "e", epoch=1)
REWARD = Principal(Scope.SERVICE, "reward-1", ServiceKind.REWARD, "reward-1")
JOINING = Principal(Scope.SERVICE, "a rollout", ServiceKind.ROLLOUT)
JOINING_AS_ANY = Principal(Scope.SERVICE, "a service")
READER = Principal(Scope.READER, "r")
BOUND_READER = Principal(Scope.READER, "b", experiment_id="e")
AGENT = Principal(Scope.AGENT, "a", experiment_id="e")
E = "/v1/experiments/e"


def some_tokens(
    store: MemoryStore | None = None, secret: str = "operator's", clock: ManualClock | None = None
) -> Tokens:
    return Tokens(store or MemoryStore(), clock or ManualClock(), secret, "joining")


@pytest.mark.parametrize(
    ("who", "method", "path", "wanted"),
    [
        (READER, "GET", E, None),
        (READER, "POST", f"{E}/stop", "needs the scope operator; this token (reader r) has the scope reader"),
        (READER, "POST", "/v1/experiments", "needs the scope operator;"),
        (READER, "GET", "/v1/tokens", "needs the scope operator;"),
        (READER, "GET", "/v1/something/new", "needs the scope operator;"),
        (READER, "PUT", "/v1/services/rollout-1/status", "needs the scope operator or service;"),
        (BOUND_READER, "GET", f"{E}/samples", None),
        (BOUND_READER, "GET", "/v1/experiments/other/samples", "is for the experiment e alone"),
        (BOUND_READER, "GET", "/v1/experiments", "is for the experiment e alone"),
        (BOUND_READER, "GET", "/v1/fleet", "is for the experiment e alone"),
        (BOUND_READER, "GET", "/v1/tokens/self", None),
        (AGENT, "GET", E, "needs the scope operator or reader; this token (agent a) has the scope agent"),
        (AGENT, "GET", "/v1/tokens/self", None),
        (JOINING, "POST", "/v1/services", None),
        (JOINING_AS_ANY, "POST", "/v1/services", None),
        (JOINING, "PUT", "/v1/services/rollout-1/status", "this token registers, and does nothing else"),
        (JOINING_AS_ANY, "GET", "/v1/services", "is for a service of kind any"),
        (ROLLOUT, "POST", "/v1/services", "is of a service that has registered"),
        (ROLLOUT, "PUT", "/v1/services/rollout-1/status", None),
        (ROLLOUT, "PUT", "/v1/services/rollout-2/status", "is of rollout-1, not of rollout-2"),
        (ROLLOUT, "DELETE", "/v1/services/trainer-1", "is of rollout-1, not of trainer-1"),
        (ROLLOUT, "POST", "/v1/services/rollout-1/drain", "needs the scope operator;"),
        (ROLLOUT, "POST", f"{E}/metrics", "needs the scope operator or service (trainer); this token"),
        (ROLLOUT, "GET", E, "needs the scope operator or reader;"),
        (ROLLOUT, "GET", "/v1/services", None),
        (REWARD, "GET", "/v1/services", None),
        (ASSIGNED, "POST", f"{E}/publications/3/sent", None),
        (ASSIGNED, "GET", f"{E}/held_out_rows", None),
        (ASSIGNED, "POST", "/v1/experiments/other/metrics", "is for the experiment e alone"),
        (ASSIGNED, "GET", "/v1/experiments/other/held_out_rows", "is for the experiment e alone"),
        (ASSIGNED, "PUT", "/v1/services/trainer-1/status", "is for the experiment e alone"),
        (TRAINER, "POST", f"{E}/publications/3/sent", "needs the token of an assignment to this experiment"),
        (TRAINER, "GET", f"{E}/held_out_rows", "needs the token of an assignment to this experiment"),
        (ROLLOUT, "GET", f"{E}/held_out_rows", "service (trainer)"),
        (TRAINER, "POST", "/v1/experiments", "needs the scope operator;"),
        (TRAINER, "GET", "/v1/tokens/self", None),
    ],
)
def test_a_token_may_do_what_its_scope_is_for(who: Principal, method: str, path: str, wanted: str | None) -> None:
    found = refusal(method, path, who)

    assert found is None if wanted is None else found is not None and wanted in found


def test_an_operator_may_do_everything() -> None:
    operator = Principal(Scope.OPERATOR, "o")
    assert {refusal(method, path, operator) for method, path in RULES} == {None}


async def test_a_pass_names_a_service_until_it_expires_and_is_renewed_in_its_second_half() -> None:
    clock = ManualClock()
    tokens = some_tokens(clock=clock)
    first = tokens.pass_of(ServiceKind.ROLLOUT, "rollout-1")

    fresh = tokens.read(first)
    clock.advance(PASS_SECONDS * 0.6)
    later = tokens.read(first)

    assert fresh is not None and (fresh.principal, fresh.renewed) == (ROLLOUT, None)
    assert later is not None and later.renewed is not None
    clock.advance(PASS_SECONDS * 0.5)
    assert tokens.read(first) is None
    renewed = tokens.read(later.renewed)
    assert renewed is not None and renewed.principal == ROLLOUT


async def test_a_gateway_that_restarts_knows_the_passes_of_the_one_before_and_another_fleets_does_not() -> None:
    shown = some_tokens().pass_of(ServiceKind.REWARD, "reward-1")

    assert (found := some_tokens().read(shown)) is not None and found.principal == REWARD
    assert some_tokens(secret="another").read(shown) is None


async def test_what_a_started_agent_shows_is_for_the_episodes_of_its_experiment_alone() -> None:
    clock = ManualClock()
    tokens = some_tokens(clock=clock)
    token = tokens.agent_of("e")
    clock.advance(100 * 86_400.0)

    shown = tokens.read(token)

    assert token == tokens.agent_of("e") == some_tokens().agent_of("e"), "or services would be told something new"
    assert shown is not None and shown.principal == Principal(Scope.AGENT, "environment", experiment_id="e")
    assert refusal("POST", f"{E}/episodes", shown.principal) is None
    for method, path in (("POST", "/v1/experiments/other/episodes"), ("GET", E), ("POST", f"{E}/stop")):
        assert refusal(method, path, shown.principal) is not None


async def test_a_pass_that_was_changed_is_nobodys() -> None:
    tokens = some_tokens()
    body, mac = tokens.pass_of(ServiceKind.ROLLOUT, "rollout-1").removeprefix(PASS_PREFIX).split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    raised = base64.urlsafe_b64encode(json.dumps(claims | {"scope": "operator"}).encode()).decode().rstrip("=")

    for forged in (f"{raised}.{mac}", f"{body}.", body, "", f"{body}.{mac[:-2]}", f"{body}.{mac}=", f"{body}.é"):
        assert tokens.read(PASS_PREFIX + forged) is None
    assert tokens.read(f"{body}.{mac}") is None


async def test_a_peers_token_opens_nothing_at_the_gateway() -> None:
    tokens = some_tokens()
    for kind in ServiceKind:
        assert tokens.read(PassKey("operator's").peer_token(kind)) is None
    assert set(tokens.peers_of(ServiceKind.REWARD)) == {ServiceKind.SANDBOX}
    assert tokens.peers_of(ServiceKind.SANDBOX) == {}


async def test_of_a_token_that_is_made_only_a_digest_is_kept() -> None:
    store = MemoryStore()
    record, token = await some_tokens(store).create(TokenRequest(name="ci", scope=Scope.READER))

    restarted = some_tokens(store)
    await restarted.load()

    assert token not in repr(vars(store)) and token[4:] not in repr(vars(store))
    assert (found := restarted.read(token)) is not None
    assert found.principal == Principal(Scope.READER, "ci")
    assert [each.action for each in await store.audit(f"tokens/{record.id}", limit=9)] == ["create"]


@pytest.mark.parametrize("by", ["id", "name"])
async def test_a_token_that_is_revoked_is_unknown_at_once(by: str) -> None:
    store = MemoryStore()
    tokens = some_tokens(store)
    record, token = await tokens.create(TokenRequest(name="ci", scope=Scope.OPERATOR))

    await tokens.revoke(getattr(record, by))

    assert tokens.read(token) is None
    assert await store.tokens() == []
    with pytest.raises(NotFound):
        await tokens.revoke("ci")


async def test_a_token_expires_and_is_forgotten() -> None:
    store, clock = MemoryStore(), ManualClock()
    tokens = some_tokens(store, clock=clock)
    _, token = await tokens.create(TokenRequest(name="ci", scope=Scope.READER, expires_in_seconds=60))
    clock.advance(59)
    assert tokens.read(token) is not None

    clock.advance(1)

    assert tokens.read(token) is None
    await tokens.delete_expired()
    assert await store.tokens() == []


async def test_a_name_is_given_once() -> None:
    tokens = some_tokens()
    await tokens.create(TokenRequest(name="ci", scope=Scope.READER))

    with pytest.raises(Conflict, match="revoke it first"):
        await tokens.create(TokenRequest(name="ci", scope=Scope.OPERATOR))


@pytest.mark.parametrize(
    "fields",
    [
        {"scope": "agent"},
        {"scope": "grader"},
        {"scope": "reader", "kind": "rollout"},
        {"scope": "operator", "experiment_id": "e"},
        {"scope": "reader", "subject": "s"},
        {"scope": "reader", "name": "a b"},
        {"scope": "reader", "expires_in_seconds": 0},
    ],
)
def test_a_token_that_makes_no_sense_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        TokenRequest.model_validate({"name": "x"} | fields)


@pytest.mark.parametrize("token", [None, "", "x", "operator", "flt_x", "flp_x.y", "flp_.", "\ud800", "\u00e9"])
async def test_what_is_no_token_is_nobodys(token: str | None) -> None:
    assert some_tokens().read(token) is None


@pytest.mark.parametrize("claim", [{"scope": "auditor"}, {"kind": "cache"}, {"rooms": ["a"]}])
def test_a_pass_of_a_later_release_that_is_not_understood_lets_nobody_in(claim: dict[str, object]) -> None:
    key = PassKey("operator's")
    body = {"scope": "service", "name": "r", "expires_at": None, "kind": "rollout"}
    assert key.read(key._written(json.dumps(body).encode())) is not None

    assert key.read(key._written(json.dumps(body | claim).encode())) is None
