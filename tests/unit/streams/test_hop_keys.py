import re

import pytest

from flotilla.shared.schemas.task import Lane
from flotilla.shared.streams import hop
from flotilla.shared.streams.hop import HopName, StreamKeys
from flotilla.shared.streams.redis.scripts import script


def test_keys_bear_one_hash_tag_and_lanes_differ() -> None:
    train, evaluation = StreamKeys("7f3"), StreamKeys("7f3", Lane.EVALUATION)

    assert train.stream(HopName.TASKS) == "{exp:7f3}:tasks"
    assert evaluation.stream(HopName.SCORED) == "{exp:7f3}:evaluation:scored"
    assert all(key.startswith("{exp:7f3}:") for key in [*train.all(), *evaluation.all(), train.marker("x")])
    assert len({*train.all(), *evaluation.all()}) == 2 * len(train.all())


@pytest.mark.parametrize("experiment_id", ["", "a}b", "a{b", "a:b", "a b"])
def test_ids_that_would_break_the_tag_are_refused(experiment_id: str) -> None:
    with pytest.raises(ValueError, match="experiment id"):
        StreamKeys(experiment_id)


def test_hops_follow_one_another() -> None:
    assert [hop.next for hop in HopName] == [HopName.GENERATED, HopName.SCORED, None]


def test_scripts_and_code_agree_on_reserved_names() -> None:
    names = re.search(r"GROUP, HANDED_BACK, PLANNED = '(.+)', '(.+)', '(.+)'", script("finish").source)

    assert names is not None
    assert names.groups() == (hop.CONSUMER_GROUP, hop.HANDED_BACK, hop.PLANNED)
