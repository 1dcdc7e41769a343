"""Rules of a spec in the gateway: each acts once its condition is met, once over crashes, recorded with what it did."""

from typing import Any

import pytest

from flotilla.services.gateway.lifecycle.rules import FIRED, Rules, stored_actions, views_of
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.state import GatewayState
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.services.gateway.store.writes import PutRecord, PutWindow
from flotilla.shared.errors import InvalidSpec, Unavailable
from flotilla.shared.schemas.experiment import ExperimentState, MetricPoint
from tests.unit.gateway.builders import MemoryPlanes, a_gateway, a_spec, add_experiment

RATE, ACCURACY = "optimisation.learning_rate", "evaluation/accuracy"
PLATEAU: dict[str, Any] = {"kind": "plateau", "patience": 2}
HALVE: dict[str, Any] = {"kind": "scale", "factors": {RATE: 0.5}}


def a_rule(**changes: Any) -> dict[str, Any]:
    return {"name": "flat", "metric": "reward/mean", "when": PLATEAU, "then": HALVE} | changes


async def add_running(gateway: GatewayState, *rules: dict[str, Any]) -> Experiment:
    spec = a_spec(optimisation={"steps": 40, "groups_per_mini_batch": 2, "learning_rate": 1e-3}, rules=list(rules))
    return await add_experiment(gateway, spec=spec.model_dump(mode="json"), policy_version=4, step=4)


def rules_of(gateway: GatewayState, experiment: Experiment) -> Rules:
    points = gateway.measurements.of(experiment).rule_points
    return Rules(experiment, gateway.repository, gateway.commands, gateway.events, gateway.store, gateway.clock, points)


async def measured(gateway: GatewayState, experiment: Experiment, *values: float, name: str = "reward/mean") -> None:
    known = await gateway.store.metrics(experiment.id, names=[name], after=0, limit=1000)
    first = len({row.step for _, row in known}) + 1
    points = [MetricPoint(name=name, step=first + n, version=first + n, value=v) for n, v in enumerate(values)]
    await gateway.store.put_metrics(experiment.id, points)


async def test_a_rule_changes_the_spec_as_a_person_would_and_says_that_it_was_the_rule() -> None:
    gateway = a_gateway()
    experiment = await add_running(gateway, a_rule())
    rules = rules_of(gateway, experiment)

    await measured(gateway, experiment, 0.5, 0.4)
    await rules.look()
    assert experiment.spec.optimisation.learning_rate == 1e-3, "one point without an improvement, two are asked"
    await measured(gateway, experiment, 0.5)
    await rules.look()

    assert experiment.spec.optimisation.learning_rate == 5e-4
    [change] = experiment.steering.changes
    assert (change.actor, change.keys[0].path) == ("rule flat", RATE)
    [view] = await views_of(gateway.store, experiment, gateway.measurements.of(experiment).rule_points)
    [fired] = view.fired
    assert (fired.step, fired.value, fired.best, fired.changes) == (3, 0.5, 0.5, (change.id,))
    assert fired.did == f"{RATE}: 0.001 to 0.0005"
    assert (view.num_fired, view.num_points, view.num_met, view.patience) == (1, 0, 0, 2)
    events = [event.type for event in await gateway.store.events(experiment.id, after=0, limit=10)]
    assert events == ["settings_changed", FIRED]
    assert next(each.action for each in await gateway.store.audit(f"experiments/{experiment.id}", limit=9)) == "rule"


async def test_a_rule_acts_as_often_as_it_may_each_time_on_points_since_it_acted_last() -> None:
    gateway = a_gateway()
    experiment = await add_running(gateway, a_rule(times=2))
    rules = rules_of(gateway, experiment)

    await measured(gateway, experiment, 0.5, 0.4, 0.4)
    await rules.look()
    await measured(gateway, experiment, 0.3, 0.3)
    await rules.look()
    assert experiment.spec.optimisation.learning_rate == 5e-4, "0.3 is the best since it acted"
    await measured(gateway, experiment, 0.3, 0.2, 0.2, 0.2, 0.2)
    await rules.look()

    assert experiment.spec.optimisation.learning_rate == 2.5e-4


async def test_points_that_came_while_no_gateway_ran_are_taken_one_by_one() -> None:
    gateway = a_gateway()
    experiment = await add_running(gateway, a_rule(times=9))
    await measured(gateway, experiment, *[0.5] * 9)

    await rules_of(gateway, experiment).look()

    actions = await stored_actions(gateway.store, experiment.id)
    assert [each.step for each in actions] == [3, 6, 9]
    assert experiment.spec.optimisation.learning_rate == pytest.approx(1e-3 / 8)


class KilledStore(MemoryStore):
    """Ends with the first transaction that has what a rule did, before or after it is stored."""

    def __init__(self, *, after: bool) -> None:
        super().__init__()
        self._after, self.is_alive = after, True

    async def apply(self, writes: Any) -> Any:
        is_last = self.is_alive and any(isinstance(each, PutWindow) and each.name == "rules" for each in writes)
        if not is_last:
            return await super().apply(writes)
        self.is_alive = False
        if self._after:
            await super().apply(writes)
        raise Unavailable("killed")


@pytest.mark.parametrize("after", [False, True])
async def test_a_rule_acts_once_over_a_kill_before_and_after_what_it_did_is_stored(after: bool) -> None:
    store, planes = KilledStore(after=after), MemoryPlanes()
    killed = a_gateway(store, planes=planes)
    experiment = await add_running(killed, a_rule())
    await measured(killed, experiment, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5)
    with pytest.raises(Unavailable):
        await rules_of(killed, experiment).look()

    gateway = a_gateway(store, planes=planes)
    await gateway.load()
    again = gateway.repository.get(experiment.id)
    await rules_of(gateway, again).look()
    await rules_of(gateway, again).look()

    assert again.spec.optimisation.learning_rate == 5e-4
    assert len(again.steering.changes) == len(await stored_actions(store, again.id)) == 1


async def test_an_action_that_only_a_checkpoint_remembers_counts() -> None:
    gateway = a_gateway()
    experiment = await add_running(gateway, a_rule())
    await measured(gateway, experiment, 0.5, 0.5, 0.5)
    await rules_of(gateway, experiment).look()
    async with gateway.repository.transaction() as change:
        change.write(PutWindow(experiment.id, "rules", {}), PutRecord(experiment.record))

    await measured(gateway, experiment, 0.5, 0.5, 0.5)
    await rules_of(gateway, experiment).look()

    assert experiment.spec.optimisation.learning_rate == 5e-4


@pytest.mark.parametrize(("kind", "state"), [("pause", ExperimentState.PAUSED), ("stop", ExperimentState.STOPPING)])
async def test_a_rule_pauses_or_stops_and_does_not_do_so_again_once_it_is_resumed(
    kind: str, state: ExperimentState
) -> None:
    gateway = a_gateway()
    experiment = await add_running(gateway, a_rule(then={"kind": kind}))
    rules = rules_of(gateway, experiment)
    await measured(gateway, experiment, 0.5, 0.5, 0.5)

    await rules.look()
    assert experiment.state is state
    await gateway.repository.update(experiment, state=ExperimentState.RUNNING)
    await measured(gateway, experiment, 0.5, 0.5, 0.5)
    await rules.look()

    assert experiment.state is ExperimentState.RUNNING


async def test_a_change_that_became_impossible_is_told_of_once_and_ends_nothing() -> None:
    gateway = a_gateway()
    clip = {"kind": "scale", "factors": {"algorithm.policy_loss.clip_low": 4.0}}
    experiment = await add_running(gateway, a_rule(then=clip))
    await gateway.commands.change(experiment.id, '{"algorithm": {"policy_loss": {"clip_low": 0.5}}}')
    await measured(gateway, experiment, 0.5, 0.5, 0.5)

    await rules_of(gateway, experiment).look()

    [fired] = await stored_actions(gateway.store, experiment.id)
    assert fired.did.startswith("could not act: ") and "clip_low" in fired.did
    assert experiment.spec.algorithm.policy_loss.clip_low == 0.5  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("rule", "field", "allowed"),
    [
        (a_rule(metric=ACCURACY), "rules.0.metric", "nothing is evaluated"),
        (a_rule(then={"kind": "set", "values": {"model.path": "x"}}), "rules.0.then.values.model.path", "have loaded"),
        (a_rule(then={"kind": "scale", "factors": {"algorithm.policy_loss.dual_clip": 2}}), "rules.0.then", "a number"),
        (a_rule(then=HALVE | {"at_least": {"optimisation.steps": 1}}), "rules.0.then.at_least", "has a factor"),
        (a_rule(then={"kind": "set", "values": {RATE: -1}}), "rules.0.then", "learning_rate"),
    ],
)
async def test_a_rule_that_could_not_act_is_refused_when_the_experiment_is_created(
    rule: dict[str, Any], field: str, allowed: str
) -> None:
    gateway = a_gateway()

    with pytest.raises(InvalidSpec) as refused:
        await gateway.commands.create(a_spec(rules=[rule]).model_dump_json())

    assert refused.value.errors[0]["path"].startswith(field)  # type: ignore[union-attr]
    assert allowed in str(refused.value.errors[0]["allowed"])


async def test_two_rules_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidSpec, match="a name of its own"):
        await a_gateway().commands.create(a_spec(rules=[a_rule(), a_rule()]).model_dump_json())


def test_a_series_that_no_run_has_is_refused_with_the_names_that_are_near() -> None:
    with pytest.raises(InvalidSpec, match="evaluation/accuracy"):
        a_spec(rules=[a_rule(metric="evaluation/acuracy")])
