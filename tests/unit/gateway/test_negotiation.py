from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla.services.gateway.publications.negotiation import (
    DeadlinePassed,
    Epoch,
    MemberGone,
    Negotiation,
    NegotiationEvent,
    Opened,
    Reported,
    SenderGone,
    SendFailed,
    Sent,
    announce,
    epoch_for,
    members_of,
    transition,
    without,
)
from flotilla.shared.schemas.publication import PublicationPhase as Phase
from flotilla.shared.schemas.publication import PublicationReport, ReceiveState, Rendezvous, Transport
from tests.unit.gateway.builders import a_manifest

MANIFEST = a_manifest(5)


def by(transport: Transport, *service_ids: str) -> dict[str, Transport]:
    return dict.fromkeys(service_ids, transport)


def meeting(epoch: int) -> Opened:
    return Opened(Rendezvous(host="h", port=1, epoch=epoch, world_size=3))


def report(service_id: str, state: ReceiveState, epoch: int = 1, checksum: str | None = None) -> Reported:
    right = MANIFEST.checksum if state is ReceiveState.RECEIVED else None
    return Reported(
        service_id, PublicationReport(version=5, epoch=epoch, state=state, checksum=checksum or right, detail="why")
    )


def joined(service_id: str, epoch: int = 1) -> Reported:
    return report(service_id, ReceiveState.JOINED, epoch)


def received(service_id: str, epoch: int = 1, checksum: str | None = None) -> Reported:
    return report(service_id, ReceiveState.RECEIVED, epoch, checksum)


def failed(service_id: str, epoch: int = 1) -> Reported:
    return report(service_id, ReceiveState.FAILED, epoch)


def announced(*members: str) -> Negotiation:
    return announce(5, 5, MANIFEST, Epoch(1, "trainer", members_of(by(Transport.GLOO, *members))))


def mixed(broadcast: set[str], mapped: set[str]) -> Negotiation:
    transports = by(Transport.GLOO, *broadcast) | by(Transport.SHARED_MEMORY, *mapped)
    return announce(5, 5, MANIFEST, Epoch(1, "trainer", members_of(transports)))


def after(state: Negotiation, *events: NegotiationEvent) -> Negotiation:
    for event in events:
        state = transition(state, event)
    return state


def test_all_members_join_then_receive_then_it_is_committed() -> None:
    state = after(announced("a", "b"), meeting(1), joined("a"))
    assert state.phase is Phase.PREPARING

    state = after(state, joined("b"))
    assert state.phase is Phase.TRANSFERRING

    state = after(state, Sent(1, MANIFEST.checksum), received("a"))
    assert state.phase is Phase.TRANSFERRING
    assert after(state, received("b")).phase is Phase.COMMITTED


def test_the_order_of_reports_does_not_matter() -> None:
    # A member may have received before another has joined: its report then says received at once.
    state = after(announced("a", "b"), meeting(1), received("b"), joined("a"))
    assert state.phase is Phase.TRANSFERRING

    assert after(state, received("a"), Sent(1, MANIFEST.checksum)).phase is Phase.COMMITTED


def test_without_members_it_is_committed_at_once() -> None:
    assert announced().phase is Phase.COMMITTED


def test_repeated_and_late_reports_change_nothing() -> None:
    state = after(announced("a", "b"), meeting(1), joined("a"))

    assert after(state, joined("a"), meeting(1)) == state
    assert after(state, joined("b", epoch=0), received("b", epoch=2), failed("b", epoch=0)) == state
    other = PublicationReport(version=4, epoch=1, state=ReceiveState.FAILED)
    assert after(state, Reported("b", other), joined("stranger"), MemberGone("stranger")) == state


def test_a_late_joined_does_not_take_a_received_back() -> None:
    state = after(announced("a", "b"), meeting(1), joined("a"), joined("b"), received("a"), joined("a"))

    assert after(state, received("b")).phase is Phase.COMMITTED


@pytest.mark.parametrize("event", [failed("b"), MemberGone("b"), received("b", checksum="0" * 16)])
@pytest.mark.parametrize("before", [(), (joined("a"),), (joined("a"), joined("b"))])
def test_a_member_that_fails_dies_or_received_garbage_is_taken_out(
    event: NegotiationEvent, before: tuple[Reported, ...]
) -> None:
    state = after(announced("a", "b"), meeting(1), *before, event)

    assert (state.phase, state.epoch.number, state.epoch.rendezvous) == (Phase.PREPARING, 2, None)
    assert state.members == {"a"} and state.joined == frozenset()
    assert "b" in (state.reason or "")
    again = after(state, joined("a", 1), meeting(2), joined("a", 2), received("a", 2))
    assert again.phase is Phase.COMMITTED


def test_when_the_last_member_goes_it_is_committed_without_members() -> None:
    state = after(announced("a"), meeting(1), joined("a"), failed("a"))

    assert (state.phase, state.members) == (Phase.COMMITTED, frozenset())


def test_when_all_that_remain_hold_the_version_it_is_committed_with_a_closed_epoch() -> None:
    state = after(announced("a", "b"), meeting(1), joined("a"), joined("b"), received("a"), failed("b"))

    assert (state.phase, state.members, state.epoch.rendezvous) == (Phase.COMMITTED, {"a"}, None)


def test_a_deadline_takes_out_who_did_not_join() -> None:
    state = after(announced("a", "b", "c"), meeting(1), joined("a"), joined("c"), DeadlinePassed())

    assert (state.members, state.epoch.number, state.phase) == ({"a", "c"}, 2, Phase.PREPARING)


def test_a_deadline_takes_out_who_did_not_receive_when_others_did() -> None:
    state = after(announced("a", "b"), meeting(1), joined("a"), joined("b"), received("a"), DeadlinePassed())

    assert (state.phase, state.members) == (Phase.COMMITTED, {"a"})


def test_a_transfer_that_reached_nobody_is_tried_once_more_with_everybody() -> None:
    # One dead member stalls the others: the next epoch, which it does not join, tells who it was.
    state = after(announced("a", "b"), meeting(1), joined("a"), joined("b"), DeadlinePassed())
    assert (state.members, state.epoch.number) == ({"a", "b"}, 2)

    state = after(state, meeting(2), joined("a", 2), DeadlinePassed())
    assert (state.members, state.epoch.number) == ({"a"}, 3)

    state = after(state, meeting(3), joined("a", 3), DeadlinePassed())
    assert (state.phase, state.members) == (Phase.COMMITTED, frozenset())


def test_a_sender_that_does_not_open_the_epoch_in_time_aborts_it() -> None:
    assert after(announced("a"), DeadlinePassed()).phase is Phase.ABORTED


def test_a_failed_send_opens_the_next_epoch_with_the_same_members_and_at_last_gives_up() -> None:
    state = after(announced("a", "b"), meeting(1), joined("a"), joined("b"), SendFailed(1, "broken pipe"))
    assert (state.members, state.epoch.number, state.phase) == ({"a", "b"}, 2, Phase.PREPARING)
    assert after(state, SendFailed(1, "late")) == state

    state = after(state, meeting(2), joined("a", 2), joined("b", 2), SendFailed(2, "again"))
    assert (state.phase, state.members) == (Phase.COMMITTED, frozenset())


def test_a_sender_that_cannot_open_an_epoch_blames_nobody_and_gives_up_in_the_end() -> None:
    state = after(announced("a", "b"), SendFailed(1, "no port"), SendFailed(2, "no port"))
    assert (state.members, state.epoch.number, state.stalls) == ({"a", "b"}, 3, 0)

    state = after(state, SendFailed(3, "no port"))
    assert (state.phase, state.members) == (Phase.COMMITTED, frozenset())


def test_a_failed_send_spares_those_that_hold_the_version() -> None:
    events = (meeting(1), joined("a"), joined("b"), received("a"), SendFailed(1, "b hung up"))

    state = after(announced("a", "b"), *events)

    assert (state.phase, state.members) == (Phase.COMMITTED, {"a"})


def test_a_sender_that_sent_something_else_aborts_it() -> None:
    state = after(announced("a"), meeting(1), joined("a"))

    assert after(state, Sent(1, "f" * 16)).phase is Phase.ABORTED
    assert after(state, Sent(0, "f" * 16)) == state


@pytest.mark.parametrize("before", [(), (meeting(1),), (meeting(1), joined("a")), (meeting(1), received("a"))])
def test_a_sender_that_is_gone_aborts_it_at_any_time(before: tuple[NegotiationEvent, ...]) -> None:
    state = after(announced("a", "b"), *before, SenderGone("its lease ended"))

    assert (state.phase, state.reason) == (Phase.ABORTED, "its lease ended")


def test_a_rendezvous_of_another_epoch_is_ignored() -> None:
    assert after(announced("a"), meeting(2)) == announced("a")


def test_who_had_joined_and_is_gone_is_not_among_those_that_hold_it() -> None:
    state = after(announced("a", "b", "c"), MemberGone("c"), received("b", epoch=2), joined("a", epoch=2))

    state = after(state, MemberGone("a"))

    assert state.phase is Phase.COMMITTED
    assert state.received == state.joined == state.members == {"b"}


EVENTS = st.one_of(
    st.integers(0, 4).map(lambda epoch: meeting(epoch) if epoch else DeadlinePassed()),
    st.builds(joined, st.sampled_from("abcd"), st.integers(1, 4)),
    st.builds(received, st.sampled_from("abcd"), st.integers(1, 4)),
    st.builds(failed, st.sampled_from("abcd"), st.integers(1, 4)),
    st.builds(MemberGone, st.sampled_from("abcd")),
    st.builds(SendFailed, st.integers(1, 4), st.just("x")),
    st.builds(Sent, st.integers(1, 4), st.just(MANIFEST.checksum)),
)


@given(st.lists(EVENTS, max_size=40), st.sets(st.sampled_from("abc")))
def test_in_any_order_of_events_the_invariants_hold(events: list[NegotiationEvent], mapping: set[str]) -> None:
    state = mixed(broadcast={"a", "b", "c"} - mapping, mapped=mapping)

    for event in events:
        before, state = state, transition(state, event)

        assert state.members <= before.members
        assert state.epoch.number >= before.epoch.number
        assert state.received <= state.joined <= state.members
        assert not (before.received - before.epoch.collective) & state.members - state.received
        if state.epoch.collective != before.epoch.collective:
            assert state.epoch.number > before.epoch.number and state.epoch.rendezvous is None
        if state.phase is Phase.TRANSFERRING:
            assert state.epoch.collective <= state.joined
        if state.phase is Phase.COMMITTED:
            assert state.received == state.members or not state.members
        if before.is_over:
            assert state == before


def test_an_open_epoch_is_used_again_only_by_the_same_sender_with_the_same_members() -> None:
    used = replace(Epoch(3, "trainer", members_of(by(Transport.GLOO, "b", "a"))), rendezvous=meeting(3).rendezvous)

    both = by(Transport.GLOO, "a", "b")
    assert epoch_for(used, 3, "trainer", both) is used
    assert epoch_for(used, 3, "trainer", by(Transport.GLOO, "a")).number == 4
    assert epoch_for(used, 3, "trainer", both | by(Transport.SHARED_MEMORY, "b")).number == 4
    assert epoch_for(used, 3, "other", both).number == 4
    assert epoch_for(replace(used, rendezvous=None), 3, "trainer", both).number == 4
    assert epoch_for(None, 7, "trainer", by(Transport.GLOO, "a")).number == 8


def test_an_epoch_of_members_that_map_is_used_again_without_a_rendezvous() -> None:
    mapping = by(Transport.SHARED_MEMORY, "a", "b")
    used = Epoch(3, "trainer", members_of(mapping))

    assert epoch_for(used, 3, "trainer", mapping) is used


def test_ranks_are_dense_from_one() -> None:
    members = members_of(by(Transport.GLOO, "d", "a", "c") | by(Transport.SHARED_MEMORY, "b"))

    assert [(m.service_id, m.rank) for m in members] == [("a", 1), ("b", None), ("c", 2), ("d", 3)]
    assert [m.rank for m in without(members, {"a"})] == [None, 1, 2]


def test_an_engine_has_as_many_ranks_as_the_devices_it_divides_its_model_among() -> None:
    members = members_of(by(Transport.ENGINE, "c", "a", "b"), engine_ranks=4)

    assert [(m.service_id, m.rank, m.num_ranks) for m in members] == [("a", 1, 4), ("b", 5, 4), ("c", 9, 4)]
    assert [(m.rank, m.num_ranks) for m in without(members, {"a"})] == [(1, 4), (5, 4)]
    epoch = epoch_for(None, 2, "trainer", by(Transport.ENGINE, "a"), engine_ranks=4)
    assert (
        epoch_for(replace(epoch, rendezvous=meeting(3).rendezvous), 3, "trainer", by(Transport.ENGINE, "a"), 2).number
        == 4
    )


def test_members_that_map_need_no_rendezvous() -> None:
    state = mixed(broadcast=set(), mapped={"a", "b"})
    assert state.phase is Phase.TRANSFERRING

    assert after(state, received("a"), received("b")).phase is Phase.COMMITTED


def test_a_mixed_group_is_committed_when_both_kinds_have_received() -> None:
    state = mixed(broadcast={"a"}, mapped={"b"})

    state = after(state, received("b"), meeting(1), joined("a"))
    assert state.phase is Phase.TRANSFERRING

    assert after(state, received("a")).phase is Phase.COMMITTED


def test_the_end_of_a_member_that_maps_does_not_disturb_the_broadcast() -> None:
    state = after(mixed(broadcast={"a"}, mapped={"b"}), meeting(1), joined("a"), MemberGone("b"))

    assert (state.phase, state.epoch.number, state.members) == (Phase.TRANSFERRING, 1, {"a"})


def test_what_is_mapped_stays_mapped_when_the_broadcast_fails() -> None:
    state = after(mixed(broadcast={"a", "c"}, mapped={"b"}), meeting(1), received("b"), MemberGone("a"))

    assert (state.phase, state.epoch.number, state.received) == (Phase.PREPARING, 2, {"b"})
    state = after(state, meeting(2), joined("c", 2), received("c", 2))
    assert state.phase is Phase.COMMITTED


def test_a_stalled_member_that_maps_is_taken_out_alone() -> None:
    state = after(mixed(broadcast={"a"}, mapped={"b"}), meeting(1), joined("a"), DeadlinePassed())

    assert (state.members, state.epoch.number, state.stalls) == ({"a"}, 1, 0)
    assert after(mixed(broadcast=set(), mapped={"b"}), DeadlinePassed()).phase is Phase.COMMITTED
