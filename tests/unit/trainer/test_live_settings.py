"""When a live change begins to hold in the trainer, and what the steps of a version are trained with."""

from flotilla.services.trainer.data.live_settings import LiveSettings
from flotilla.shared.config.sections.curriculum import CurriculumConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.live_changes import AdoptAnswer, AdoptRequest, Effect, LiveChange
from tests.unit.config.test_live import a_change
from tests.unit.trainer.builders import a_spec

RATE = "optimisation.learning_rate"


class Gateway:
    """Has some changes, of which those that wait hold from the version that it is asked at."""

    def __init__(self, *changes: LiveChange) -> None:
        self.changes = changes
        self.asked: list[int] = []
        self.kept: list[tuple[LiveChange, ...]] = []

    async def ask(self, request: AdoptRequest) -> AdoptAnswer:
        self.asked.append(request.version)
        held = [
            each if each.version is not None else each.model_copy(update={"version": request.version})
            for each in self.changes
        ]
        self.changes = tuple(held)
        return AdoptAnswer(changes=self.changes)

    def settings(self, base: ExperimentSpec, *known: LiveChange) -> LiveSettings:
        return LiveSettings(base, known, self.ask, self.kept.append)


async def test_a_change_holds_from_the_version_that_the_trainer_asked_at() -> None:
    base = a_spec()
    gateway = Gateway(a_change("c1", (RATE, base.optimisation.learning_rate, 0.5)))
    live = gateway.settings(base)
    assert not live.has_news and live.spec_at(3) is base

    live.announce("c1")
    assert live.has_news
    await live.adopt(3, 3)

    assert not live.has_news and gateway.asked == [3]
    assert gateway.kept == [(), live.changes], "checkpoints are told"
    assert live.spec_at(2).optimisation.learning_rate == base.optimisation.learning_rate
    assert live.spec_at(3).optimisation.learning_rate == 0.5
    assert live.spec_at(4) is live.spec_at(3), "the same settings are the same object"


async def test_a_trainer_that_comes_back_trains_each_version_as_before() -> None:
    base = a_spec()
    rate = base.optimisation.learning_rate
    known = (a_change("c1", (RATE, rate, 0.5), version=3), a_change("c2", (RATE, 0.5, 0.25), version=5))

    live = Gateway().settings(base, *known)

    assert [live.spec_at(v).optimisation.learning_rate for v in (2, 3, 4, 5, 6)] == [rate, 0.5, 0.5, 0.25, 0.25]
    assert not live.has_news


async def test_what_groups_carry_does_not_change_how_others_are_trained() -> None:
    base = a_spec()
    change = a_change("c1", ("rollout.sampling.temperature", 1.0, 0.7), version=1, effect=Effect.GROUP)

    assert Gateway().settings(base, change).spec_at(4) is base


async def test_a_change_is_noticed_where_the_database_has_lost_the_one_before_it() -> None:
    base = a_spec()
    rate = base.optimisation.learning_rate
    first, lost = a_change("c1", (RATE, rate, 0.5), version=3), a_change("c2", (RATE, 0.5, 0.25), version=5)
    gateway = Gateway(first)
    live = gateway.settings(base, first, lost)
    live.announce("c1")
    assert not live.has_news, "it has been trained with what the database lost"

    gateway.changes = (first, a_change("c3", (RATE, 0.5, 0.125)))
    live.announce("c3")
    assert live.has_news
    await live.adopt(8, 8)

    assert not live.has_news
    assert [each.id for each in live.changes] == ["c1", "c2", "c3"]
    assert [live.spec_at(v).optimisation.learning_rate for v in (4, 7, 8)] == [0.5, 0.25, 0.125]


async def test_what_is_known_of_a_curriculums_rows_is_asked_for_with_each_version() -> None:
    base = a_spec()
    pools = {"curriculum": CurriculumConfig.model_validate({"pools": [{"name": "all"}]})}
    gateway = Gateway()
    live = gateway.settings(base.model_copy(update={"data": base.data.model_copy(update=pools)}))

    assert live.has_news and not gateway.settings(base).has_news
    await live.adopt(3, 3)
    assert live.has_news and gateway.asked == [3]


async def test_a_change_of_weights_of_rows_waits_for_its_group() -> None:
    base = a_spec()
    change = a_change("c1", ("data.sources.0.weight", 1.0, 2.0), version=3, effect=Effect.GROUP)
    gateway = Gateway(change.model_copy(update={"group_id": 7}))
    live = gateway.settings(base, change)

    assert live.has_news
    await live.adopt(4, 4)

    assert not live.has_news and gateway.kept[-1][0].group_id == 7
