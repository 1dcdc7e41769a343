"""Replayed routers keep their names: verl's R2 and R3 are ours."""

from typing import Any

import pytest

from tests.unit.importers.sources import import_flat

ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize("engine", ["", "megatron.", "veomni."])
@pytest.mark.parametrize(("mode", "expected"), [("disabled", None), ("R2", "R2"), ("R3", "R3")])
def test_verls_modes_are_ours(engine: str, mode: str, expected: str | None) -> None:
    spec = import_flat("verl", {f"{ACTOR}.{engine}router_replay.mode": mode}).spec

    assert spec.algorithm.router_replay == expected


def test_the_engine_records_where_r3_replays() -> None:
    given: dict[str, Any] = {
        f"{ACTOR}.router_replay.mode": "R3",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay": True,
    }

    assert import_flat("verl", given).spec.algorithm.router_replay == "R3"
