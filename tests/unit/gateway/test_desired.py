import json
from dataclasses import replace

import pytest

from flotilla.services.gateway.digest import digest
from flotilla.services.gateway.registry import desired as registry_desired
from flotilla.services.gateway.registry.desired import (
    MOST_BODIES,
    DesiredBodies,
    DesiredStates,
    ExperimentFacts,
    ServiceFacts,
    desired,
)
from flotilla.shared.schemas.experiment import ExperimentState as State
from flotilla.shared.schemas.publication import PublicationOrder, PublicationPhase
from flotilla.shared.schemas.service import DesiredState, ServiceKind, WorkState
from tests.unit.gateway.builders import a_manifest

ROLLOUT = ServiceFacts("rollout-1", ServiceKind.ROLLOUT, is_draining=False)
TRAINER = ServiceFacts("trainer-1", ServiceKind.TRAINER, is_draining=False)
FACTS = ExperimentFacts(
    experiment_id="a",
    state=State.RUNNING,
    revision=1,
    spec={"name": "a"},
    spec_digest=digest({"name": "a"}),
    directory="/d",
    trainer_epoch=1,
    policy_version=0,
    weights_address="http://trainer/",
    hold_version=None,
)
ORDER = PublicationOrder(
    version=1,
    epoch=1,
    rank=1,
    phase=PublicationPhase.PREPARING,
    rendezvous=None,
    manifest=a_manifest(),
    deadline_seconds=1.0,
)


def test_a_service_without_an_experiment_is_idle() -> None:
    answer = desired(ROLLOUT, None)

    assert (answer.state, answer.assignment) == (WorkState.IDLE, None)


@pytest.mark.parametrize("state", [State.STOPPING, State.STOPPED, State.COMPLETED, State.FAILED, State.DRAFT])
def test_an_experiment_that_is_not_at_work_leaves_its_services_idle(state: State) -> None:
    assert desired(ROLLOUT, replace(FACTS, state=state)) == desired(ROLLOUT, None)


def test_a_paused_experiment_pauses_its_services_and_keeps_them() -> None:
    answer = desired(ROLLOUT, replace(FACTS, state=State.PAUSED))

    assert answer.state is WorkState.PAUSED
    assert answer.assignment is not None


def test_a_draining_service_keeps_its_experiment_until_it_is_done() -> None:
    answer = desired(replace(ROLLOUT, is_draining=True), FACTS)

    assert answer.state is WorkState.DRAINING
    assert answer.assignment is not None
    assert desired(replace(ROLLOUT, is_draining=True), None).state is WorkState.DRAINING


def test_weights_can_be_pulled_once_a_version_is_published_and_a_trainer_lives() -> None:
    assert desired(ROLLOUT, FACTS).weights_url is None
    assert desired(ROLLOUT, replace(FACTS, policy_version=3)).weights_url == "http://trainer/v1/weights/3"
    assert desired(ROLLOUT, replace(FACTS, policy_version=3, weights_address=None)).weights_url is None


def test_versions_and_publications_are_told_to_rollouts_alone() -> None:
    facts = replace(FACTS, policy_version=3, hold_version=2)

    rollout, trainer = desired(ROLLOUT, facts, ORDER), desired(TRAINER, facts, ORDER)

    assert (rollout.policy_version, rollout.hold_version, rollout.publication) == (3, 2, ORDER)
    assert (trainer.policy_version, trainer.hold_version, trainer.publication) == (None, None, None)


def test_equal_facts_give_equal_tags_in_every_process() -> None:
    # Written down, so that a change of the tag's making is seen: it makes every service look twice after an upgrade.
    assert desired(ROLLOUT, FACTS).tag == desired(ROLLOUT, replace(FACTS, spec=dict(FACTS.spec))).tag
    assert desired(ROLLOUT, None).tag == digest(["idle"])


@pytest.mark.parametrize(
    "changed",
    [
        {"state": State.PAUSED},
        {"revision": 2},
        {"spec_digest": "other"},
        {"directory": "/e"},
        {"policy_version": 1},
        {"hold_version": 0},
    ],
)
def test_the_tag_changes_with_every_field_that_a_rollout_sees(changed: dict[str, object]) -> None:
    assert desired(ROLLOUT, replace(FACTS, **changed)).tag != desired(ROLLOUT, FACTS).tag


def test_the_tag_changes_with_the_publication_and_with_the_trainers_epoch() -> None:
    moved = ORDER.model_copy(update={"phase": PublicationPhase.TRANSFERRING})
    tags = {desired(ROLLOUT, FACTS, order).tag for order in (None, ORDER, moved)}

    assert len(tags) == 3
    assert desired(TRAINER, replace(FACTS, trainer_epoch=2)).tag != desired(TRAINER, FACTS).tag
    assert desired(ROLLOUT, replace(FACTS, trainer_epoch=2)).tag == desired(ROLLOUT, FACTS).tag


def test_what_is_computed_once_for_many_is_what_each_would_be_told() -> None:
    states = DesiredStates()
    others = [
        replace(FACTS, state=State.PAUSED),
        replace(FACTS, revision=2, spec={"name": "b"}, spec_digest=digest({"name": "b"})),
        replace(FACTS, policy_version=1),
        replace(FACTS, policy_version=1, weights_address="http://elsewhere/"),
        None,
    ]
    services = [
        ROLLOUT,
        TRAINER,
        replace(ROLLOUT, is_draining=True),
        replace(ROLLOUT, is_draining=True, notice_ends=9.0, notice_seconds=4.0),
        replace(ROLLOUT, is_draining=True, notice_ends=9.0, notice_seconds=3.0),
    ]

    for facts in [FACTS, *others, FACTS]:
        for service in services * 2:
            assert states.of(service, facts) == desired(service, facts)
            assert states.of(service, facts, ORDER) == desired(service, facts, ORDER)
    assert states.of(ROLLOUT, FACTS) is states.of(replace(ROLLOUT, service_id="rollout-2"), FACTS)


def test_what_is_for_one_service_alone_is_computed_again_when_it_changes() -> None:
    states, later = DesiredStates(), ORDER.model_copy(update={"phase": PublicationPhase.TRANSFERRING})

    assert states.of(ROLLOUT, FACTS, ORDER) is states.of(ROLLOUT, FACTS, ORDER)
    for order in (later, None, ORDER):
        assert states.of(ROLLOUT, FACTS, order) == desired(ROLLOUT, FACTS, order)
    for service in (
        replace(TRAINER, token="one"),
        replace(TRAINER, token="two"),
        replace(ROLLOUT, peers=("http://p",)),
    ):
        assert states.of(service, FACTS) == desired(service, FACTS)
        assert states.of(service, replace(FACTS, policy_version=1)) == desired(
            service, replace(FACTS, policy_version=1)
        )


def test_rollouts_alone_are_told_the_token_of_the_agents_that_they_start() -> None:
    started, states = replace(FACTS, agent_token="flp_a"), DesiredStates()

    for service in (ROLLOUT, replace(ROLLOUT, is_draining=True), replace(TRAINER, token="flp_t")):
        told = states.of(service, started).assignment
        assert told is not None and told.token == ("flp_a" if service.kind is ServiceKind.ROLLOUT else "flp_t")
    assert states.of(ROLLOUT, started) is states.of(replace(ROLLOUT, service_id="rollout-2"), started)
    assert states.of(ROLLOUT, started).tag != states.of(ROLLOUT, FACTS).tag
    assert states.of(TRAINER, started).tag == states.of(TRAINER, FACTS).tag


def test_an_encoded_answer_is_the_answer_and_is_shared() -> None:
    bodies = DesiredBodies()
    answers = [desired(ROLLOUT, replace(FACTS, policy_version=version)) for version in range(2 * MOST_BODIES)]
    draining = replace(ROLLOUT, is_draining=True, notice_ends=9.0)
    answers += [desired(replace(draining, notice_seconds=seconds), FACTS) for seconds in (4.0, 3.0)]

    for answer in answers:
        assert DesiredState.model_validate_json(bodies.of(answer)) == answer
    last = desired(ROLLOUT, FACTS)
    assert bodies.of(last) is bodies.of(last.model_copy())


def test_orders_and_peers_are_encoded_around_what_many_have(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies, facts = DesiredBodies(), replace(FACTS, spec={"name": "a", "seed": [1, None, '\u00e9"']}, policy_version=3)
    states, lacking = DesiredStates(), replace(ROLLOUT, peers=("http://a", "http://b"))
    orders = [ORDER.model_copy(update={"rank": rank, "num_ranks": 2}) for rank in (1, 2, None)]
    answers = [states.of(service, facts, order) for service in (ROLLOUT, lacking) for order in (*orders, None)]
    encoded: list[str] = []
    only = registry_desired._only
    monkeypatch.setattr(registry_desired, "_only", lambda model, name: encoded.append(name) or only(model, name))

    for answer in answers:
        assert DesiredState.model_validate_json(bodies.of(answer)) == answer
        assert json.loads(bodies.of(answer)) == json.loads(answer.model_dump_json())

    assert sorted(encoded) == ["manifest", "spec"]
    leaving = replace(lacking, is_draining=True, notice_ends=9.0, notice_seconds=2.5)
    answer = states.of(leaving, facts, ORDER)
    assert DesiredState.model_validate_json(bodies.of(answer)) == answer


def test_each_member_has_a_tag_of_its_own_and_the_manifest_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    states, read = DesiredStates(), []
    digest_of = registry_desired._digest_of
    monkeypatch.setattr(registry_desired, "_digest_of", lambda manifest: read.append(1) or digest_of(manifest))
    orders = [ORDER.model_copy(update={"rank": rank}) for rank in range(1, 9)]

    tags = {states.of(ROLLOUT, FACTS, order).tag for order in orders}

    assert (len(tags), len(read)) == (8, 1)
    other = ORDER.model_copy(update={"manifest": a_manifest(2)})
    assert states.of(ROLLOUT, FACTS, other).tag not in tags
    assert len(read) == 2


def test_a_rollout_that_lacks_the_version_is_told_who_else_has_it() -> None:
    facts = replace(FACTS, policy_version=3, policy_checksum="0" * 16)
    lacking = replace(ROLLOUT, peers=("http://a/", "http://b"))
    states = DesiredStates()

    told, others = states.of(lacking, facts), states.of(ROLLOUT, facts)

    assert told.weights_peers == ("http://a/v1/weights/3", "http://b/v1/weights/3")
    assert others.weights_peers == ()
    assert told.tag != others.tag


@pytest.mark.parametrize(
    ("service", "may_hold"),
    [(TRAINER, False), (replace(ROLLOUT, is_lent=True), True), (ROLLOUT, None)],
    ids=["the trainer", "a lent rollout", "one that has devices of its own"],
)
def test_of_rollouts_the_lent_ones_alone_take_turns_where_devices_are_lent(
    service: ServiceFacts, may_hold: bool | None
) -> None:
    facts = replace(FACTS, device_shift=2, is_lending=True, may_hold=ServiceKind.ROLLOUT)

    states = DesiredStates()
    states.of(TRAINER, facts), states.of(ROLLOUT, facts)
    for order in (desired(service, facts).device, states.of(service, facts).device):
        assert (None if order is None else order.may_hold) == may_hold
