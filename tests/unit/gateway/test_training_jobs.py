"""Training jobs on several hosts: who is which node, and what ends a job everywhere."""

from flotilla.services.gateway.membership.training_jobs import STORE_SECONDS, node_of, why_ended
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.clock import ManualClock
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.service import JobNode, JobReport, ObservedState, ServiceKind, WorkState
from tests.unit.gateway.builders import a_gateway, a_spec, add_experiment, add_service, say, stop

TRAINER = ServiceKind.TRAINER
SPEC = a_spec(parallelism={"ranks": 4, "nodes": 2}).model_dump(mode="json")
OPENED = JobReport(epoch=3, host="10.0.0.1", port=4711)


async def a_job(gateway: GatewayState, **changes: int) -> tuple[Experiment, list[str]]:
    experiment = await add_experiment(gateway, spec=SPEC, trainer_epoch=2, **changes)
    return experiment, [await add_service(gateway, TRAINER, name, experiment.id) for name in ("one", "two")]


async def report(gateway: GatewayState, service_id: str, job: JobReport, **fields: object) -> JobNode | None:
    observed = ObservedState(experiment_id="tiny-1", state=WorkState.STARTING, job=job, **fields)
    desired = await say(gateway, service_id, observed)
    assert desired.assignment is not None
    node: JobNode | None = desired.assignment.node
    return node


async def events(gateway: GatewayState) -> list[str]:
    found = await gateway.store.events("tiny-1", after=0, limit=100)
    return [str(each.data["cause"]) for each in found if each.type == "training_job_ended"]


def test_nodes_follow_the_order_of_registration_and_learn_where_the_first_one_is() -> None:
    reports = {"a": OPENED, "b": None, "spare": None}

    assert node_of("a", 2, 3, reports) == JobNode(rank=0, count=2)
    assert node_of("b", 2, 3, reports) == JobNode(rank=1, count=2, host="10.0.0.1", port=4711)
    assert node_of("spare", 2, 3, reports) is None


def test_nobody_has_a_place_before_all_are_there() -> None:
    assert node_of("a", 2, 3, {"a": OPENED}) is None


def test_what_is_said_of_another_epoch_counts_for_nothing() -> None:
    earlier = JobReport(epoch=2, host="10.0.0.1", port=4711, ended="rank 1 of 4 was ended by SIGKILL")

    assert node_of("b", 2, 3, {"a": earlier, "b": None}) == JobNode(rank=1, count=2)
    assert why_ended(3, {"a": earlier, "b": None}) is None
    assert why_ended(2, {"a": earlier, "b": None}) == "rank 1 of 4 was ended by SIGKILL"


async def test_both_services_are_told_their_place_in_one_epoch() -> None:
    gateway = a_gateway()
    experiment, (first, second) = await a_job(gateway)

    assert await report(gateway, first, JobReport(epoch=2, host="h", port=1)) == JobNode(rank=0, count=2)
    assert await report(gateway, second, JobReport(epoch=2)) == JobNode(rank=1, count=2, host="h", port=1)
    assert gateway.registry.trainer_of(experiment.id) is gateway.registry.get(first)
    await stop(gateway)


async def test_a_node_whose_ranks_end_ends_the_job_on_all_of_them() -> None:
    gateway = a_gateway()
    experiment, (first, second) = await a_job(gateway)
    await report(gateway, first, JobReport(epoch=2, host="h", port=1))

    await report(gateway, second, JobReport(epoch=2, ended="rank 2 of 4 was ended by SIGKILL"))
    await gateway.reconciler.reconcile()
    await gateway.reconciler.reconcile()

    assert experiment.record.trainer_epoch == 3
    assert await events(gateway) == ["rank 2 of 4 was ended by SIGKILL"]
    assert await report(gateway, second, JobReport(epoch=3)) == JobNode(rank=1, count=2), "the store was another one"
    await stop(gateway)


async def test_a_service_that_is_lost_ends_the_job_and_another_takes_its_place() -> None:
    gateway = a_gateway()
    experiment, (first, second) = await a_job(gateway)

    await gateway.fleet.leave(second, reason="its lease ended")

    assert experiment.record.trainer_epoch == 3
    assert await events(gateway) == [f"node 2 of 2 (service {second}) on here is gone: its lease ended"]
    assert await report(gateway, first, JobReport(epoch=2)) is None
    spare = await add_service(gateway, TRAINER, "three")
    await gateway.reconciler.reconcile()
    assert experiment.record.trainer_epoch == 4
    await report(gateway, first, JobReport(epoch=4, host="h", port=2))
    assert await report(gateway, spare, JobReport(epoch=4)) == JobNode(rank=1, count=2, host="h", port=2)
    await stop(gateway)


async def test_a_first_node_that_never_opens_the_store_is_not_waited_for_without_end() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock, lease_seconds=10 * STORE_SECONDS)
    experiment, (first, _) = await a_job(gateway)
    await gateway.reconciler.reconcile()

    clock.advance(STORE_SECONDS + 1)
    await gateway.reconciler.reconcile()

    assert experiment.record.trainer_epoch == 3
    assert await events(gateway) == [
        f"node 1 of 2 (service {first}) did not open the store of the training job within {STORE_SECONDS:g} s"
    ]
    await stop(gateway)


async def test_an_experiment_starts_when_there_are_as_many_trainers_as_nodes() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway, spec=SPEC, state=ExperimentState.STARTING)
    for kind in (ServiceKind.ROLLOUT, ServiceKind.REWARD, TRAINER):
        await add_service(gateway, kind, f"{kind} one")

    await gateway.reconciler.reconcile()
    before = gateway.registry.trainers_of(experiment.id)
    problem = experiment.record.problem
    await add_service(gateway, TRAINER, "trainer two")
    await gateway.reconciler.reconcile()

    assert before == [] and problem is not None and "1 trainer to register" in problem["cause"]
    assert len(gateway.registry.trainers_of(experiment.id)) == 2
    await stop(gateway)


async def test_steps_are_those_that_the_first_node_reports() -> None:
    gateway = a_gateway()
    experiment, (first, second) = await a_job(gateway)

    await report(gateway, second, JobReport(epoch=2), step=5)
    assert experiment.record.step == 0
    await report(gateway, first, JobReport(epoch=2), step=4)

    assert experiment.record.step == 4
    await stop(gateway)
