"""A version goes from member to member: each passes it on to few, and whoever breaks off holds nobody else up."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla.services.gateway.publications.negotiation import (
    DeadlinePassed,
    Epoch,
    MemberGone,
    Negotiation,
    SendFailed,
    Sent,
    announce,
    breaks_epoch,
    epoch_for,
    members_of,
    order_of,
)
from flotilla.services.gateway.publications.relays import FAN_OUT, Beside, Relays, relayed_of
from flotilla.shared.schemas.publication import PublicationPhase as Phase
from flotilla.shared.schemas.publication import Transport
from tests.unit.gateway.test_negotiation import MANIFEST, after, by, failed, joined, meeting, received


def names(prefix: str, num: int) -> list[str]:
    return [f"{prefix}{number:03}" for number in range(num)]


def an_epoch(group: list[str], relayed: list[str], memories: dict[str, str] | None = None) -> Epoch:
    transports = by(Transport.GLOO, *group, *relayed)
    return Epoch(1, "trainer", members_of(transports, beside=Beside(relayed, memories or {})))


def announced(group: list[str], relayed: list[str], memories: dict[str, str] | None = None) -> Negotiation:
    """A publication whose group has joined."""
    state = announce(5, 5, MANIFEST, an_epoch(group, relayed, memories))
    return after(state, meeting(1), *(joined(each) for each in group))


def sources_of(state: Negotiation, name: str) -> tuple[str, ...] | None:
    order = order_of(name, state, 10.0, lambda service_id: f"http://{service_id}")
    return None if order is None else tuple(url.split("/")[2] for url in order.sources)


@pytest.mark.parametrize("num", [17, 64, 200, 1000])
def test_each_passes_it_on_to_few_at_a_time_and_all_have_it_after_few_waves(num: int) -> None:
    relays = Relays.of(an_epoch(names("g", 16), names("r", num - 16)).members, "trainer")
    waves, have = 0, set[str]()
    under_way = relays.under_way
    while under_way:
        fed = Counter(relays.sources[each] for each in under_way if each in relays.sources)
        assert max(fed.values(), default=0) <= FAN_OUT and "trainer" not in fed
        for each in sorted(under_way):
            relays = relays.received(each)
        have |= under_way
        under_way, waves = relays.under_way, waves + 1

    assert len(have) == num and not relays.waiting
    assert waves == relays.waves + 1 <= 6


def test_nobody_is_fed_before_a_member_has_the_image() -> None:
    state = announced(["a"], ["r"])
    assert (state.phase, sources_of(state, "r")) == (Phase.TRANSFERRING, None)

    state = after(state, received("a"))

    assert sources_of(state, "r") == ("a", "trainer")
    assert after(state, received("r")).phase is Phase.COMMITTED


def test_a_version_is_not_committed_while_somebody_fetches_it() -> None:
    state = after(announced(["a"], names("r", 3)), received("a"), Sent(1, MANIFEST.checksum))
    assert [sources_of(state, each) for each in names("r", 3)] == [("a", "trainer"), ("a", "trainer"), None]

    state = after(state, received("r001"))

    assert state.phase is Phase.TRANSFERRING
    assert sources_of(state, "r002") == ("a", "trainer")
    assert after(state, received("r000"), received("r002")).phase is Phase.COMMITTED


def test_a_report_that_is_repeated_gives_no_further_place() -> None:
    state = after(announced(["a"], names("r", 8)), received("a"))

    assert after(state, received("a"), received("a")) == state


@pytest.mark.parametrize("event", [failed("r000"), MemberGone("r000"), received("r000", checksum="0" * 16)])
def test_who_fails_or_has_something_else_is_left_out_and_its_place_is_the_next_ones(event: object) -> None:
    state = after(announced(["a"], names("r", 3)), received("a"))

    state = after(state, event)  # type: ignore[arg-type]

    assert (state.epoch.number, state.members) == (1, {"a", "r001", "r002"})
    assert sources_of(state, "r002") == ("a", "trainer")


def test_a_source_that_dies_leaves_its_receivers_with_the_sender_and_is_no_source_again() -> None:
    state = after(announced(["a", "b"], names("r", 9)), received("a"), received("b"))
    assert [state.relays.sources[each] for each in names("r", 4)] == ["a", "a", "b", "b"]

    state = after(state, MemberGone("a"))

    # The group has done its part: it is not formed again, and nobody who fetches begins anew.
    assert (state.epoch.number, state.epoch.collective, state.phase) == (1, frozenset(), Phase.TRANSFERRING)
    gone = order_of("r000", state, 10.0, lambda each: None if each == "a" else f"http://{each}")
    assert gone is not None and gone.sources == ("http://trainer/v1/weights/5",)
    state = after(state, received("r000"))
    assert "a" not in state.relays.free
    assert state.relays.sources["r004"] == "r000"
    for each in names("r", 9):
        state = after(state, received(each))
    assert (state.phase, state.received) == (Phase.COMMITTED, {"b", *names("r", 9)})


def test_no_member_is_taken_for_a_sender_that_is_gone() -> None:
    """Whoever fetches shows the last address the token that is for the trainer."""
    state = after(announced(["a"], ["r"]), received("a"))

    order = order_of("r", state, 10.0, lambda each: None if each == "trainer" else f"http://{each}")

    assert order is not None and (order.sources, order.may_map) == ((), False)


def test_a_member_that_dies_before_the_group_has_the_image_has_it_formed_again() -> None:
    state = after(announced(["a", "b", "c"], ["r", "s", "t"]), received("a"))
    assert sources_of(state, "r") == ("a", "trainer")
    state = after(state, received("r"), MemberGone("b"))

    assert (state.epoch.number, state.epoch.collective, state.phase) == (2, {"a", "c"}, Phase.PREPARING)
    assert state.received == {"r"}
    assert sources_of(state, "t") == ("r", "trainer")


def test_without_anybody_else_the_sender_passes_it_on() -> None:
    state = after(announced(["a"], ["r", "s", "t"]), MemberGone("a"))

    assert (state.epoch.number, state.epoch.collective, state.phase) == (1, frozenset(), Phase.TRANSFERRING)
    assert [sources_of(state, each) for each in "rst"] == [("trainer",), ("trainer",), None]
    state = after(state, received("r"), received("s"))
    assert sources_of(state, "t") == ("trainer",)
    assert after(announced(["a"], ["r"]), MemberGone("a"), MemberGone("r")).phase is Phase.COMMITTED


def rounds_of(relays: Relays) -> int:
    """Count how often all that fetch have the version, until nobody waits."""
    rounds = 0
    while under_way := relays.under_way:
        for each in sorted(under_way):
            relays = relays.received(each)
        rounds += 1
    assert not relays.waiting
    return rounds


def test_the_deadline_has_the_waves_that_are_left_where_the_whole_group_is() -> None:
    """A phase for what is under way, and one for each wave after it."""
    group, relayed = names("g", 16), names("r", 984)
    begun = announce(5, 5, MANIFEST, an_epoch(group, relayed))
    never = after(begun, *(SendFailed(number, "no port is free") for number in (1, 2, 3)))
    gone = after(announced(group, relayed), *(received(each) for each in group), *(MemberGone(each) for each in group))

    assert begun.relays.waves == 4
    assert (len(never.members), never.relays.waves) == (984, 7)
    assert rounds_of(never.relays) <= never.relays.waves + 1
    # Those that had a source fetch from the sender all at once, as long as it would take in waves from two on.
    assert (len(gone.relays.under_way), gone.relays.waves) == (2 * 16, 7)
    assert rounds_of(gone.relays) <= gone.relays.waves + 1


def test_a_member_of_many_that_is_gone_costs_no_wave_more() -> None:
    state = after(announced(names("g", 16), names("r", 984)), *(received(each) for each in names("g", 16)))
    before = state.relays.waves

    assert after(state, MemberGone("g003"), MemberGone("r001"), MemberGone("r500")).relays.waves == before


def test_a_group_that_the_sender_cannot_form_leaves_its_members_to_it() -> None:
    state = announce(5, 5, MANIFEST, an_epoch(["a"], ["r"]))
    for number in (1, 2, 3):
        assert state.phase is Phase.PREPARING
        state = after(state, SendFailed(number, "no port is free"))

    assert (state.members, state.phase, sources_of(state, "r")) == ({"r"}, Phase.TRANSFERRING, ("trainer",))


def test_the_deadline_takes_the_group_out_first_and_then_those_that_fetch() -> None:
    state = after(announced(["a", "b"], ["r"]), received("a"), DeadlinePassed())
    assert state.members == {"a", "r"} and state.phase is Phase.TRANSFERRING

    state = after(state, DeadlinePassed())

    assert (state.members, state.phase) == ({"a"}, Phase.COMMITTED)
    assert "r" in (state.reason or "")


def test_a_broadcast_that_reached_nobody_is_tried_again_with_everybody() -> None:
    state = after(announced(["a", "b"], ["r"]), DeadlinePassed())

    assert (state.epoch.number, state.members, state.phase) == (2, {"a", "b", "r"}, Phase.PREPARING)


def test_a_send_that_breaks_when_all_of_the_group_have_it_changes_nothing_for_the_others() -> None:
    state = after(announced(["a"], ["r", "s"]), received("a"), SendFailed(1, "broke off"))

    assert (state.epoch.number, state.phase, sources_of(state, "s")) == (1, Phase.TRANSFERRING, ("a", "trainer"))
    assert after(state, SendFailed(1, "again")) == state


def test_of_a_host_one_fetches_the_image_and_the_others_map_it() -> None:
    hosts = {"g": "one", "h": "one", "r": "two", "s": "two", "t": "two"}
    state = announced(["g"], ["h", "r", "s", "t"], hosts)
    state = after(state, received("g"))
    assert [sources_of(state, each) for each in "hrst"] == [("g", "trainer"), ("g", "trainer"), None, None]
    may_map = {each: order_of(each, state, 1.0, str) for each in "hr"}
    assert [order is not None and order.may_map for order in may_map.values()] == [True, False]

    state = after(state, received("r"))

    assert state.relays.sources["s"] == state.relays.sources["t"] == "r"
    for each in "hst":
        assert each not in after(state, received(each)).relays.free


def test_what_another_gateway_has_begun_is_gone_on_with() -> None:
    state = announced(["g"], ["r", "s", "t"], dict.fromkeys("rst", "two"))

    state = after(state, received("s"), received("r"), received("g"))

    assert (state.relays.under_way, sources_of(state, "t")) == ({"t"}, ("r", "trainer"))
    assert after(state, received("t")).phase is Phase.COMMITTED


def test_where_the_one_that_fetches_dies_another_of_its_host_does() -> None:
    hosts = dict.fromkeys("rst", "two")
    state = after(announced(["g"], ["r", "s", "t"], hosts), received("g"), MemberGone("r"))

    assert [sources_of(state, each) for each in "st"] == [("g", "trainer"), None]
    state = after(state, received("s"))
    assert sources_of(state, "t") == ("s", "trainer")


def test_a_group_has_so_many_members_and_keeps_them() -> None:
    everybody = by(Transport.GLOO, *names("r", 6)) | by(Transport.SHARED_MEMORY, "m")
    assert relayed_of(everybody, everybody, {}, {"r004", "r005"}, 3) == {"r001", "r002", "r003"}
    # Releases that know nothing of it are in the group, however many there are.
    assert relayed_of(everybody, {"r000"}, {}, set(), 3) == {"r000"}
    assert relayed_of(everybody, set(), {}, set(), 1) == set()
    nccl = by(Transport.NCCL, *names("r", 6))
    assert relayed_of(nccl, nccl, {}, set(), 1) == set()


def test_of_each_host_one_is_in_the_group() -> None:
    everybody = by(Transport.GLOO, *names("r", 6))
    hosts = {each: f"host{number // 2}" for number, each in enumerate(names("r", 6))}

    assert relayed_of(everybody, everybody, hosts, {"r003"}, 16) == {"r001", "r002", "r005"}


def test_who_is_relayed_to_comes_and_goes_without_the_group_being_formed_again() -> None:
    used = replace(an_epoch(["a", "b"], ["r"]), rendezvous=meeting(1).rendezvous)
    more = by(Transport.GLOO, "a", "b", "r", "s")

    again = epoch_for(used, 1, "trainer", more, beside=Beside("rs"))

    assert (again.number, again.rendezvous, set(again.service_ids)) == (1, used.rendezvous, {"a", "b", "r", "s"})
    assert epoch_for(used, 1, "trainer", by(Transport.GLOO, "a", "b", "r"), beside=Beside("br")).number == 2
    assert not breaks_epoch(MemberGone("r"), used)
    assert breaks_epoch(MemberGone("a"), used)


@given(st.data())
def test_whatever_happens_it_ends_with_all_that_are_left(data: st.DataObject) -> None:
    num_group, num_relayed = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    group, relayed = names("g", num_group), names("r", num_relayed)
    hosts = {each: data.draw(st.sampled_from("xyz")) for each in relayed if data.draw(st.booleans())}
    state = announced(group, relayed, hosts)
    for _ in range(40):
        if state.is_over:
            break
        ready = sorted((state.relays.under_way | state.epoch.collective) - state.received)
        waiting = sorted(state.epoch.collective - state.joined)
        events: list[object] = [joined(each, state.epoch.number) for each in waiting]
        if state.epoch.collective and state.epoch.rendezvous is None:
            events = [meeting(state.epoch.number)]
        elif state.phase is Phase.TRANSFERRING:
            # Nobody waits for a thing that does not come: somebody can go on, whatever happened.
            assert ready
            events += [received(each, state.epoch.number) for each in ready]
            events += [failed(each, state.epoch.number) for each in ready]
            events += [MemberGone(each) for each in sorted(state.members)]
        state = after(state, data.draw(st.sampled_from(events)))  # type: ignore[arg-type]
        assert state.received <= state.members

    assert state.phase is Phase.COMMITTED and state.received == state.members
