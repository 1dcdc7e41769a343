"""Stored specs of earlier revisions mean in this release what they meant when they were written."""

import copy

import pytest

from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.revisions import MIGRATIONS, REVISION, migrated
from flotilla.shared.errors import InvalidSpec
from tests.unit.gateway.builders import a_spec

ONE_SERVER = {"engine": {"kind": "sglang", "url": "http://10.0.0.7:30000"}}


def an_old_spec(minimum: int = 2, url: str = "http://10.0.0.7:30000") -> dict[str, object]:
    """Make a spec that was legal before one server had one rollout."""
    document = a_spec(rollout={"group_size": 2, **ONE_SERVER}).model_dump(mode="json")
    document["rollout"]["engine"]["url"] = url
    document["resources"]["rollouts"]["min"] = minimum
    return document


def test_rollouts_at_one_server_become_the_one_that_it_always_had_work_for() -> None:
    old = an_old_spec()
    written = copy.deepcopy(old)
    with pytest.raises(InvalidSpec, match=r"resources\.rollouts\.min is 2"):
        validate_spec(old)

    spec = validate_spec(migrated(old, 0))

    assert spec.resources.rollouts.min == 1
    assert old == written, "what is stored stays as it was written"


def test_a_spec_that_no_migration_is_about_is_the_same_one() -> None:
    for document in (a_spec().model_dump(mode="json"), an_old_spec(url="http://127.0.0.1:30000"), an_old_spec(1), {}):
        assert migrated(document, 0) == document


def test_only_later_migrations_are_made_in_their_order() -> None:
    chain = [lambda spec, n=n: {**spec, "made": [*spec["made"], n]} for n in range(3)]

    assert migrated({"made": []}, 1, chain) == {"made": [1, 2]}
    assert migrated({"made": []}, 3, chain) == {"made": []}
    with pytest.raises(ValueError, match="revision 4 of the schema is of a later release; this one reads up to 3"):
        migrated({"made": []}, 4, chain)
    assert len(MIGRATIONS) == REVISION
