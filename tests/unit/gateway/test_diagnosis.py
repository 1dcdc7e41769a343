from dataclasses import replace

import pytest

from flotilla.services.gateway.monitoring.diagnosis import Observation, Situation, diagnose, progress_of
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.publication import PublicationPhase
from flotilla.shared.schemas.service import ServiceKind as Kind
from flotilla.shared.schemas.service import WorkState
from flotilla.shared.streams.ledger import HopCounts, Ledger, TokenCounts

SERVICES = [Observation(f"{kind}-1", kind, WorkState.RUNNING, 3) for kind in (Kind.TRAINER, Kind.ROLLOUT, Kind.REWARD)]
WELL = Situation(
    state=ExperimentState.RUNNING,
    services=SERVICES,
    ledger=Ledger(),
    budget=8,
    groups_per_step=4,
    policy_version=3,
)


def named(situation: Situation) -> tuple[str, str]:
    found = diagnose(situation)
    assert found is not None
    return found


def hops(**counts: int) -> HopCounts:
    return HopCounts(**counts)


@pytest.mark.parametrize("kind", [Kind.TRAINER, Kind.ROLLOUT, Kind.REWARD])
def test_a_missing_kind_is_named_first(kind: Kind) -> None:
    situation = replace(WELL, services=[s for s in SERVICES if s.kind is not kind])

    assert named(situation) == (kind.value, f"no live {kind} service")


@pytest.mark.parametrize(
    ("ledger", "component", "words"),
    [
        (None, "redis", "does not answer"),
        (Ledger(waiting=hops(scored=4)), "trainer", "4 scored groups are ready"),
        (Ledger(waiting=hops(generated=64)), "reward", "64 generated groups wait and none is claimed"),
        (Ledger(claimed=hops(generated=2)), "reward", "2 generated groups are claimed and none is scored"),
        (
            Ledger(claimed=hops(tasks=5)),
            "rollout",
            "5 tasks are claimed and none is finished; long answers take as long, just wait",
        ),
        (Ledger(waiting=hops(tasks=5)), "rollout", "5 tasks wait and none is claimed"),
        (Ledger(outstanding=0, consumed_since_publication=8), "trainer", "nothing is published"),
        (Ledger(), "gateway", "could be issued"),
    ],
)
def test_the_hop_where_work_piles_up_names_the_component(ledger: Ledger | None, component: str, words: str) -> None:
    found, cause = named(replace(WELL, ledger=ledger))

    assert found == component
    assert words in cause


def test_a_rollout_that_is_behind_is_named() -> None:
    behind = [replace(s, policy_version=2) if s.kind is Kind.ROLLOUT else s for s in SERVICES]

    component, cause = named(replace(WELL, services=behind, ledger=Ledger(waiting=hops(tasks=1))))

    assert component == "rollout"
    assert "rollout-1 serves version 2" in cause


@pytest.mark.parametrize("version", [None, -1])
def test_a_rollout_that_has_no_version_yet_is_said_to_have_none(version: int | None) -> None:
    loading = [replace(s, policy_version=version) if s.kind is Kind.ROLLOUT else s for s in SERVICES]

    _, cause = named(replace(WELL, services=loading, ledger=Ledger(waiting=hops(tasks=1))))

    assert cause.endswith("rollout-1 has not loaded any version yet")


def test_a_service_that_does_not_start_is_named() -> None:
    loading = [replace(s, state=WorkState.STARTING) if s.kind is Kind.TRAINER else s for s in SERVICES]

    found = named(replace(WELL, state=ExperimentState.STARTING, services=loading))

    assert found[0] == "trainer"
    assert found[1].startswith(
        "trainer-1 is starting and not yet running; loading torch and the model may take a minute"
    )


def test_a_service_that_says_why_it_cannot_work_is_named_with_it_where_no_other_works() -> None:
    unable = replace(SERVICES[1], state=WorkState.STARTING, cause="the server at http://x cannot be reached now")
    waiting = replace(WELL, services=[SERVICES[0], unable, SERVICES[2]], ledger=Ledger(claimed=hops(tasks=5)))
    another = replace(unable, service_id="rollout-2", state=WorkState.RUNNING, cause=None)

    assert named(waiting) == ("rollout", "rollout-1 is starting: the server at http://x cannot be reached now")
    assert "5 tasks are claimed" in named(replace(waiting, services=[*waiting.services, another]))[1]


def test_an_open_publication_and_a_final_evaluation_are_named() -> None:
    assert named(replace(WELL, publication=PublicationPhase.PREPARING))[0] == "publication"
    assert named(replace(WELL, is_trained=True, evaluating_version=3))[0] == "evaluation"


def test_every_counter_that_moves_is_progress() -> None:
    base = Ledger(issued=5, planned=1, trained=1)
    moved = [
        Ledger(issued=6, planned=1, trained=1),
        Ledger(issued=5, planned=2, trained=1),
        Ledger(issued=5, planned=1, trained=2),
        Ledger(issued=5, planned=1, trained=1, filtered={"x": 1}),
        Ledger(issued=5, planned=1, trained=1, tokens=TokenCounts(generated=1)),
    ]

    seen = {progress_of(1, 1, ledger, Ledger()) for ledger in [base, *moved]}
    seen |= {progress_of(2, 1, base, Ledger()), progress_of(1, 2, base, Ledger()), progress_of(1, 1, base, base)}

    assert len(seen) == 9


def test_an_evaluation_alone_misses_no_trainer() -> None:
    sampling = [service for service in SERVICES if service.kind is not Kind.TRAINER]
    alone = replace(WELL, services=sampling, trains=False, is_trained=True, evaluating_version=0)

    assert named(alone)[0] == "evaluation"
    assert named(replace(alone, services=sampling[:1])) == ("reward", "no live reward service")
