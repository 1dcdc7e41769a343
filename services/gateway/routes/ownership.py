"""What tokens with an owner see of the whole fleet: services that work for them, or for nobody, and their shares."""

import re

from flotilla.services.gateway.records.repository import owner_of
from flotilla.services.gateway.registry.services import LiveService
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.net.authorisation.access import Principal
from flotilla.shared.schemas.fleet import FleetView

ANOTHERS = "another owner's experiment"


def may_see(service: LiveService, caller: Principal, gateway: GatewayState) -> bool:
    """Whether a caller may see a service: what it works for, and has not yet let go of, is theirs."""
    if caller.owner is None:
        return True
    works_for = {service.experiment_id, service.observed.experiment_id} - {None}
    return all(owner_of(gateway.repository, each) == caller.owner for each in works_for if each is not None)


def fleet_of(view: FleetView, owner: str, gateway: GatewayState) -> FleetView:
    """Show an owner's part of the fleet; others' experiments, which theirs may wait for, without their ids."""
    foreign = [each for each in view.experiments if owner_of(gateway.repository, each.experiment_id) != owner]
    others = re.compile("|".join(re.escape(each.experiment_id) for each in foreign) or r"(?!)")
    own = [each for each in view.experiments if each not in foreign]
    shown = [
        each if each.waiting is None else each.model_copy(update={"waiting": others.sub(ANOTHERS, each.waiting)})
        for each in own
    ]
    return view.model_copy(update={"experiments": tuple(shown)})
