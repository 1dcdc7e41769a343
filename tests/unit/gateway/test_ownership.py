"""Experiments belong to the owner of the token that made them, and so does what they left."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.access.caller import caller
from flotilla.services.gateway.lifecycle.origins import check_owned
from flotilla.services.gateway.records.repository import owner_of
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.errors import InvalidSpec, NotFound, QuotaExceeded
from flotilla.shared.net.authorisation.access import Principal, Scope
from flotilla.shared.net.authorisation.token_records import Quota, TokenRequest
from flotilla.shared.schemas.experiment import ExperimentState, ForkRequest
from tests.unit.gateway.builders import a_gateway, a_spec, add_experiment
from tests.unit.gateway.stored import store_checkpoint

ADMIN = Principal(Scope.OPERATOR, "operator")
LONGER = {"optimisation": {"steps": 5}}


def of(owner: str, name: str = "laptop") -> Principal:
    """Make the identity of a token of an owner."""
    return Principal(Scope.OPERATOR, f"{owner}-{name}", owner=owner)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    token = caller.set(None)
    yield
    caller.reset(token)


@pytest.fixture
def gateway(tmp_path: Path) -> GatewayState:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1?", "label": "1"}\n' * 8)
    return a_gateway(data=tmp_path / "fleet")


async def add_ended(gateway: GatewayState, who: Principal | None, experiment_id: str, **changes: Any) -> Path:
    """Add an experiment of somebody, with a checkpoint; return its directory."""
    caller.set(who)
    folder = gateway.settings.data.parent
    paths = {"model": {"path": str(folder / "model")}, "data": {"path": str(folder / "train.jsonl")}}
    document = a_spec(**paths).model_dump(mode="json")
    directory = gateway.settings.experiments / experiment_id
    facts = {"state": ExperimentState.COMPLETED, "final_ledger": {}, "step": 2, "policy_version": 2}
    await add_experiment(gateway, experiment_id, spec=document, directory=str(directory), **(facts | changes))
    store_checkpoint(directory, 2, document)
    return directory


async def begin(gateway: GatewayState, who: Principal, **checkpoint: Any) -> Any:
    """Create an experiment as somebody, beginning from a checkpoint."""
    caller.set(who)
    folder = gateway.settings.data.parent
    spec = a_spec(
        model={"path": str(folder / "model")},
        data={"path": str(folder / "train.jsonl")},
        optimisation={"steps": 5, "groups_per_mini_batch": 2},
        checkpoint=checkpoint,
    )
    return await gateway.commands.create(spec.model_dump_json())


async def test_an_experiment_is_of_the_owner_whose_token_made_it_and_so_is_its_fork(gateway: GatewayState) -> None:
    await add_ended(gateway, of("alice"), "a-1")

    fork = await gateway.commands.fork("a-1", ForkRequest(changes=LONGER), start=False)

    assert owner_of(gateway.repository, "a-1") == fork.record.owner == "alice"
    assert owner_of(gateway.repository, "gone") is None
    assert {each.owner for each in await gateway.store.experiments()} == {"alice"}


@pytest.mark.parametrize("where", ["b-1", "b-1@2", "tiny", "PATH", "PATH@2", "LINK"])
async def test_nobody_begins_from_anothers_checkpoint_however_it_is_named(gateway: GatewayState, where: str) -> None:
    directory = await add_ended(gateway, of("bob"), "b-1")
    link = gateway.settings.data.parent / "link"
    link.symlink_to(directory)
    reference = where.replace("PATH", str(directory)).replace("LINK", str(link))

    with pytest.raises((NotFound, InvalidSpec), match=r"there is no experiment|in no experiment of alice"):
        await begin(gateway, of("alice"), resume_from=reference)

    assert [each.id for each in gateway.repository] == ["b-1"]
    assert (await begin(gateway, of("bob"), resume_from=reference)).record.owner == "bob"
    assert (await begin(gateway, ADMIN, resume_from=reference)).record.owner is None


async def test_a_name_means_the_owners_own_experiment_of_it(gateway: GatewayState) -> None:
    await add_ended(gateway, of("alice"), "a-1", number=1)
    await add_ended(gateway, of("bob"), "b-1", number=2)

    begun = await begin(gateway, of("alice"), resume_from="tiny")

    assert begun.record.origin is not None and begun.record.origin["experiment_id"] == "a-1"


def test_a_spec_of_an_owner_names_no_file_of_the_fleet_that_is_not_theirs(tmp_path: Path) -> None:
    owners, root = {"a-1": "alice", "b-1": "bob"}, tmp_path / "experiments"
    for name in (
        f"{root}/b-1/samples/x.jsonl",
        f"{root}/none-1/x",
        f"{root}/a-1/../b-1/x",
        f"{tmp_path}/gateway.sqlite",
    ):
        with pytest.raises(InvalidSpec, match=r"data\.path: .* in no experiment of alice"):
            check_owned(a_spec(data={"path": name}), "alice", owners.get, root)

    check_owned(a_spec(data={"path": f"{root}/a-1/samples/x.jsonl"}), "alice", owners.get, root)
    check_owned(a_spec(data={"path": "/elsewhere/rows.jsonl"}), "alice", owners.get, root)


async def test_all_tokens_of_an_owner_share_a_quota(gateway: GatewayState) -> None:
    quota = Quota(experiments=2)
    for name in ("alice-laptop", "alice-ci"):
        await gateway.tokens.create(TokenRequest(name=name, scope=Scope.OPERATOR, owner="alice", quota=quota))
    await add_ended(gateway, of("alice"), "a-1")
    await add_ended(gateway, of("alice", "ci"), "a-2")

    with pytest.raises(QuotaExceeded, match="the quota of owner alice for experiments is 2, of which 2 are used"):
        await add_ended(gateway, of("alice", "ci"), "a-3")
    await add_ended(gateway, of("bob"), "b-1")


@pytest.mark.parametrize("scope", [Scope.SERVICE, Scope.TINKER, Scope.AGENT])
def test_only_operators_and_readers_have_owners(scope: Scope) -> None:
    bound = {"experiment_id": "e"} if scope is Scope.AGENT else {}

    with pytest.raises(ValueError, match=f"owner has no effect with the scope {scope}"):
        TokenRequest(name="x", scope=scope, owner="alice", **bound)
