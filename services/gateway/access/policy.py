"""Which scope may use which route: one table, and a pure function that reads it.

A route that is not in the table is the operator's alone.
"""

import re
from dataclasses import dataclass
from re import Pattern
from typing import Final

from starlette.routing import compile_path

from flotilla.services.gateway.page.files import PAGE_PATHS
from flotilla.shared.net.authorisation.access import Principal, Scope
from flotilla.shared.schemas.service import ServiceKind

EXPERIMENT: Final = "/v1/experiments/{experiment_id}"
SERVICE: Final = "/v1/services/{service_id}"
EVERY_KIND: Final = frozenset(ServiceKind)
OF_EXPERIMENT: Final = re.compile(r"/v1/experiments/([^/]+)")
OPEN_PATHS: Final = frozenset({"/healthz", "/readyz", "/metrics", "/openapi.json", "/docs"}) | PAGE_PATHS
"""For which no token is wanted."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The scopes besides operators that may use a route.

    Attributes:
        scopes: that may.
        kinds: of service, for the scope service.
        is_joining: for services that have not registered yet, and for no others.
        is_own: a service may name only itself in the path.
        is_assigned: a service needs the token of its assignment to the experiment; whether it is still assigned, the
            route asks (``routes/dependencies.py``).
        is_for_bound: tokens that are bound to an experiment may use it, though its path names none.
    """

    scopes: frozenset[Scope]
    kinds: frozenset[ServiceKind] = frozenset()
    is_joining: bool = False
    is_own: bool = False
    is_assigned: bool = False
    is_for_bound: bool = False


READING: Final = Rule(frozenset({Scope.READER}))
OPERATING: Final = Rule(frozenset())
TRAINING: Final = Rule(frozenset({Scope.SERVICE}), frozenset({ServiceKind.TRAINER}), is_assigned=True)
READING_OR_TRAINING: Final = Rule(
    frozenset({Scope.READER, Scope.SERVICE}), frozenset({ServiceKind.TRAINER}), is_assigned=True
)
ACTING: Final = Rule(frozenset({Scope.AGENT}), is_for_bound=True)
"""Which episode it is about, the route compares."""
MEMBER: Final = Rule(frozenset({Scope.SERVICE}), EVERY_KIND, is_own=True)

TINKER: Final = Rule(frozenset({Scope.TINKER}))
"""Whose session, model or saved one it is, ``tinker/`` compares."""
API: Final = "/api/v1"
CHECKPOINT: Final = f"{API}/training_runs/{{run}}/checkpoints/{{kind}}/{{name}}"

RULES: Final[dict[tuple[str, str], Rule]] = {
    # Asked for most often by far, so it is found first.
    ("PUT", f"{SERVICE}/status"): MEMBER,
    ("DELETE", SERVICE): MEMBER,
    ("POST", "/v1/services"): Rule(frozenset({Scope.SERVICE}), EVERY_KIND, is_joining=True),
    # Rewards and rollouts look for a sandbox.
    ("GET", "/v1/services"): Rule(
        frozenset({Scope.READER, Scope.SERVICE}), frozenset({ServiceKind.REWARD, ServiceKind.ROLLOUT})
    ),
    ("GET", SERVICE): READING,
    ("POST", f"{SERVICE}/checks"): MEMBER,
    ("POST", f"{SERVICE}/drain"): OPERATING,
    # Of whichever experiments it worked for.
    ("GET", f"{SERVICE}/logs"): OPERATING,
    ("GET", "/v1/fleet"): READING,
    ("POST", "/v1/fleet/checks"): OPERATING,
    ("POST", "/v1/fleet/prunings"): OPERATING,
    ("POST", f"{EXPERIMENT}/metrics"): TRAINING,
    ("POST", f"{EXPERIMENT}/checkpoints"): TRAINING,
    ("POST", f"{EXPERIMENT}/takeovers"): TRAINING,
    ("POST", f"{EXPERIMENT}/takeovers/refused"): TRAINING,
    ("GET", f"{EXPERIMENT}/changes"): READING,
    ("POST", f"{EXPERIMENT}/changes/adopted"): TRAINING,
    ("GET", f"{EXPERIMENT}/held_out_rows"): READING_OR_TRAINING,
    ("POST", f"{EXPERIMENT}/publications"): TRAINING,
    ("PUT", f"{EXPERIMENT}/publications/{{version}}/rendezvous"): TRAINING,
    ("POST", f"{EXPERIMENT}/publications/{{version}}/sent"): TRAINING,
    ("POST", f"{EXPERIMENT}/publications/{{version}}/failed"): TRAINING,
    ("GET", f"{EXPERIMENT}/publications/{{version}}"): READING_OR_TRAINING,
    ("GET", f"{EXPERIMENT}/publications"): READING,
    ("GET", "/v1/experiments"): READING,
    ("GET", EXPERIMENT): READING,
    ("GET", f"{EXPERIMENT}/ledger"): READING,
    ("GET", f"{EXPERIMENT}/metrics"): READING,
    ("GET", f"{EXPERIMENT}/series"): READING,
    ("GET", f"{EXPERIMENT}/events"): READING,
    ("GET", f"{EXPERIMENT}/log"): READING,
    ("GET", f"{EXPERIMENT}/logs"): READING,
    ("GET", f"{EXPERIMENT}/checkpoints"): READING,
    ("GET", f"{EXPERIMENT}/checkpoints/{{step}}/upload"): READING,
    ("GET", f"{EXPERIMENT}/checkpoints/{{step}}/files"): READING,
    ("GET", f"{EXPERIMENT}/checkpoints/{{step}}/files/{{name:path}}"): READING,
    ("GET", f"{EXPERIMENT}/diagnosis"): READING,
    ("GET", f"{EXPERIMENT}/audit"): READING,
    ("GET", f"{EXPERIMENT}/usage"): READING,
    ("GET", f"{EXPERIMENT}/steps/{{step}}"): READING,
    ("GET", f"{EXPERIMENT}/samples"): READING,
    ("GET", f"{EXPERIMENT}/profiles"): READING,
    ("GET", f"{EXPERIMENT}/profiles/{{name}}"): READING,
    ("POST", f"{EXPERIMENT}/episodes"): Rule(frozenset({Scope.AGENT})),
    ("POST", f"{EXPERIMENT}/episodes/give-back"): Rule(frozenset({Scope.AGENT})),
    ("GET", f"{EXPERIMENT}/episodes"): READING,
    ("POST", "/v1/episodes/{episode_id}/complete"): ACTING,
    ("POST", "/v1/episodes/{episode_id}/reward"): ACTING,
    ("POST", "/v1/chat/completions"): ACTING,
    ("POST", "/v1/completions"): ACTING,
    ("POST", "/v1/responses"): ACTING,
    ("POST", "/v1/messages"): ACTING,
    ("POST", "/v1/messages/count_tokens"): ACTING,
    ("GET", "/v1/models"): ACTING,
    ("POST", "/v1/experiments"): OPERATING,
    ("PATCH", EXPERIMENT): OPERATING,
    ("DELETE", EXPERIMENT): OPERATING,
    ("POST", f"{EXPERIMENT}/start"): OPERATING,
    ("POST", f"{EXPERIMENT}/pause"): OPERATING,
    ("POST", f"{EXPERIMENT}/resume"): OPERATING,
    ("POST", f"{EXPERIMENT}/stop"): OPERATING,
    ("POST", f"{EXPERIMENT}/extend"): OPERATING,
    ("POST", f"{EXPERIMENT}/fork"): OPERATING,
    ("GET", "/v1/tokens/self"): Rule(frozenset(Scope), EVERY_KIND, is_for_bound=True),
    ("GET", "/v1/webhooks"): OPERATING,
    ("GET", "/v1/tokens"): OPERATING,
    ("POST", "/v1/tokens"): OPERATING,
    ("DELETE", "/v1/tokens/{token_id}"): OPERATING,
    **{
        ("POST", f"{API}/{name}"): TINKER
        for name in (
            "retrieve_future",
            "asample",
            "forward_backward",
            "optim_step",
            "session_heartbeat",
            "client/config",
            "client/dynamic_config",
            "telemetry",
            "create_session",
            "sessions/{session_id}/finish",
            "create_model",
            "get_info",
            "save_weights",
            "save_weights_for_sampler",
            "save_weights_external",
            "load_weights",
            "create_sampling_session",
            "weights_info",
            "unload_model",
        )
    },
    **{
        ("GET", f"{API}/{name}"): TINKER
        for name in (
            "healthz",
            "get_server_capabilities",
            "samplers/{sampler_id}",
            "training_runs",
            "training_runs/{run}",
            "training_runs/{run}/checkpoints",
            "checkpoints",
            "sequences/{sequence_id}",
            "ledger",
        )
    },
    ("GET", f"{CHECKPOINT}/external_weights_urls"): TINKER,
    ("GET", f"{CHECKPOINT}/archive"): TINKER,
    ("DELETE", CHECKPOINT): TINKER,
    ("PUT", f"{CHECKPOINT}/ttl"): TINKER,
    ("POST", f"{CHECKPOINT}/publish"): TINKER,
    ("DELETE", f"{CHECKPOINT}/publish"): TINKER,
}

FOR_OWNERS: Final = frozenset(
    {
        ("POST", "/v1/experiments"),
        ("GET", "/v1/experiments"),
        ("GET", "/v1/fleet"),
        ("GET", "/v1/services"),
        ("GET", SERVICE),
        ("GET", "/v1/tokens/self"),
    }
)
"""Routes without an experiment in their path that tokens with an owner may use: they make or show what is the owner's.
Of routes with one, the guard compares whose that is."""

_COMPILED: Final[list[tuple[str, Pattern[str], Rule, bool]]] = [
    (method, compile_path(template)[0], rule, (method, template) in FOR_OWNERS)
    for (method, template), rule in RULES.items()
]


def refusal(method: str, path: str, who: Principal) -> str | None:
    """Return why a token may not make this request; None if it may.

    Ownership of an experiment is not checked here: see ``experiment_of``.
    """
    if who.scope is Scope.OPERATOR and who.owner is None:
        return None
    rule, parameters, is_for_owners = _rule_of(method, path)
    if who.owner is not None and not is_for_owners and "experiment_id" not in parameters:
        return f"{method} {path} is about the whole fleet; this token ({who.actor}) is of the owner {who.owner} alone"
    if who.scope is Scope.OPERATOR:
        return None
    if who.scope not in rule.scopes:
        return _wants(method, path, rule, f"this token ({who.actor}) has the scope {who.scope}")
    if who.scope is Scope.SERVICE and not rule.is_for_bound:
        of_service = _refusal_of_service(method, path, rule, parameters.get("service_id"), who)
        if of_service is not None:
            return of_service
    is_elsewhere = who.experiment_id is not None and parameters.get("experiment_id") != who.experiment_id
    if is_elsewhere and not rule.is_for_bound:
        return f"this token is for the experiment {who.experiment_id} alone"
    return None


def _refusal_of_service(method: str, path: str, rule: Rule, service_id: str | None, who: Principal) -> str | None:
    if who.kind not in rule.kinds and not (rule.is_joining and who.kind is None):
        return _wants(method, path, rule, f"this token ({who.actor}) is for a service of kind {who.kind or 'any'}")
    if rule.is_joining is not (who.service_id is None):
        what = "registers" if who.service_id is None else "is of a service that has registered"
        return _wants(method, path, rule, f"this token {what}, and does nothing else with it")
    if rule.is_assigned and who.epoch is None:
        return f"{method} {path} needs the token of an assignment to this experiment; this one is of the service"
    if rule.is_own and service_id != who.service_id:
        return f"this token is of {who.service_id}, not of {service_id}"
    return None


def experiment_of(path: str) -> str | None:
    """Return the experiment that a path is about; None: it is about none, whatever it leads to."""
    found = OF_EXPERIMENT.match(path)
    return None if found is None else found[1]


def _rule_of(method: str, path: str) -> tuple[Rule, dict[str, str], bool]:
    for its_method, pattern, rule, is_for_owners in _COMPILED:
        if its_method == method and (found := pattern.fullmatch(path)):
            return rule, found.groupdict(), is_for_owners
    return OPERATING, {}, False


def _wants(method: str, path: str, rule: Rule, but: str) -> str:
    return f"{method} {path} needs the scope {' or '.join(needed(rule))}; {but}"


def needed(rule: Rule) -> list[str]:
    """Name the scopes that a rule lets in, as people read them."""
    names = [Scope.OPERATOR.value, *sorted(scope.value for scope in rule.scopes - {Scope.OPERATOR, Scope.SERVICE})]
    if Scope.SERVICE in rule.scopes:
        every = rule.kinds == EVERY_KIND
        names.append("service" if every else f"service ({', '.join(sorted(rule.kinds))})")
    return names
