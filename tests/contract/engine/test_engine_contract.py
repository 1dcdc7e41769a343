"""What every engine promises, asked of each of them; what only some promise, of those."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flotilla.services.rollout.engines.base import Completion, Engine, Prefix, ResumeRule
from flotilla.services.rollout.engines.scripted import ScriptedEngine
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import (
    InvalidRequest,
    PromptTooLong,
    RequestInFlight,
    Unavailable,
    WeightTransferFailed,
    WorkerDied,
)
from flotilla.shared.schemas.engine import EngineCapability
from flotilla.shared.schemas.trajectory import FinishReason
from tests.contract.engine.conftest import (
    CONTEXT,
    LONG,
    SLOTS,
    begin_running,
    needs,
    until_in_flight,
    until_running,
)
from tests.contract.engine.requests import a_request


async def test_each_seed_gets_its_completion(engine: Engine) -> None:
    completions = await engine.generate(a_request(seeds=(1, 2, 3), max_new_tokens=5))

    assert [completion.token_ids.shape for completion in completions] == [(5,)] * 3
    for completion in completions:
        assert completion.token_ids.dtype == np.int32
        assert completion.log_probs.dtype == np.float32
        assert (completion.log_probs <= 0).all() and np.isfinite(completion.log_probs).all()
        assert completion.versions == ((0, 3),)
        assert completion.finish_reason is FinishReason.LENGTH


async def test_a_completion_depends_on_its_seed_alone(engine: Engine) -> None:
    needs(engine, EngineCapability.SEEDED_SAMPLING)
    alone = await engine.generate(a_request(seeds=(7,), max_new_tokens=12))

    crowd = [engine.generate(a_request(range(2, 2 + size), seeds=range(size), max_new_tokens=9)) for size in (3, 2, 4)]
    among_others, *_ = await asyncio.gather(engine.generate(a_request(seeds=(5, 7), max_new_tokens=12)), *crowd)

    assert among_others[1].token_ids.tolist() == alone[0].token_ids.tolist()
    assert among_others[0].token_ids.tolist() != alone[0].token_ids.tolist()


async def test_more_samples_than_slots_are_all_served(engine: Engine) -> None:
    before = (await engine.load()).generated_tokens
    requests = [a_request(seeds=range(5), max_new_tokens=4) for _ in range(6)]
    requests.append(a_request(seeds=range(SLOTS * 2 + 1), max_new_tokens=4))

    answers = await asyncio.gather(*(engine.generate(request) for request in requests))

    assert [len(answer) for answer in answers] == [5] * 6 + [SLOTS * 2 + 1]
    load = await engine.load()
    assert (load.running, load.waiting, load.slots) == (0, 0, SLOTS)
    assert load.generated_tokens - before == (30 + SLOTS * 2 + 1) * 4


async def test_a_stop_token_ends_a_completion_and_stays_in_it(engine: Engine) -> None:
    [free] = await engine.generate(a_request(max_new_tokens=10, greedy=True))
    stop = int(free.token_ids[4])
    first = free.token_ids.tolist().index(stop)

    [stopped] = await engine.generate(a_request(max_new_tokens=10, greedy=True, stop_token_ids=(stop, 95)))

    assert stopped.token_ids.tolist() == free.token_ids[: first + 1].tolist()
    assert stopped.finish_reason is FinishReason.STOP


async def test_what_does_not_fit_the_context_is_refused_with_both_numbers(engine: Engine) -> None:
    with pytest.raises(PromptTooLong, match=f"make {CONTEXT + 1}.* holds {CONTEXT}"):
        await engine.generate(a_request([5] * 100, max_new_tokens=CONTEXT - 99))

    assert len(await engine.generate(a_request())) == 1


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("prompt_ids", {"prompt_ids": ()}),
        ("prompt_ids", {"prompt_ids": (5, 100_000)}),
        ("seeds", {"seeds": ()}),
        ("seeds", {"seeds": (-1,)}),
        ("max_new_tokens", {"max_new_tokens": 0}),
        ("temperature", {"temperature": 0.0}),
        ("top_p", {"top_p": 0.0}),
        ("top_k", {"top_k": -1}),
        ("stop", {"stop": ("",)}),
    ],
)
async def test_a_bad_field_is_named(engine: Engine, field: str, changes: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await engine.generate(a_request(**changes))  # type: ignore[arg-type]

    assert [entry["field"] for entry in caught.value.errors] == [field]


async def test_an_id_in_flight_is_refused(engine: Engine) -> None:
    running = asyncio.create_task(engine.generate(a_request(request_id="same", max_new_tokens=LONG)))
    await until_in_flight(engine)

    with pytest.raises(RequestInFlight, match="same is in flight"):
        await engine.generate(a_request(request_id="same"))

    await engine.abort("same")
    await running


async def test_an_abort_returns_what_there_is(engine: Engine) -> None:
    request = a_request(seeds=(1, 2), request_id="long", max_new_tokens=LONG)
    running = await begin_running(engine, request, running=2, new_tokens=10)

    await engine.abort("unknown")
    await engine.abort("long")

    completions = await running
    assert {completion.finish_reason for completion in completions} == {FinishReason.ABORTED}
    assert all(5 <= completion.token_ids.size < LONG for completion in completions)
    assert (await engine.load()).running == 0


async def test_cancelling_generate_ends_the_request(engine: Engine) -> None:
    running = await begin_running(engine, a_request(seeds=(1, 2), max_new_tokens=LONG), running=2)

    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running
    await until_running(engine, running=0)


@pytest.mark.parametrize("mode", [OnWeightUpdate.INTERRUPT, OnWeightUpdate.CONTINUE])
async def test_samples_in_flight_bear_both_versions(engine: Engine, image: Path, mode: OnWeightUpdate) -> None:
    running = await begin_running(engine, a_request(seeds=(1, 2), max_new_tokens=LONG), running=2, new_tokens=20)

    await engine.load_weights(image, 4, mode)

    assert (await engine.load()).version == 4
    for completion in await running:
        (first, old), (start, new) = completion.versions
        assert (first, old, new) == (0, 3, 4)
        assert 0 < start < LONG
        assert completion.token_ids.size == LONG


async def test_drain_finishes_what_runs_and_holds_back_what_waits(engine: Engine, image: Path) -> None:
    running = await begin_running(engine, a_request(seeds=(1, 2), max_new_tokens=LONG), running=2)
    update = asyncio.create_task(engine.load_weights(image, 4, OnWeightUpdate.DRAIN))
    await asyncio.sleep(0.01)
    later = asyncio.create_task(engine.generate(a_request(max_new_tokens=3)))

    await update

    assert running.done() or (await engine.load()).running <= 1
    assert [completion.versions for completion in await running] == [((0, 3),)] * 2
    assert [completion.versions for completion in await later] == [((0, 4),)]


@pytest.mark.parametrize("mode", list(OnWeightUpdate))
async def test_who_holds_the_weights_finishes_under_them(engine: Engine, image: Path, mode: OnWeightUpdate) -> None:
    held = a_request(seeds=range(SLOTS + 3), max_new_tokens=LONG // 4, holds_weights=True)
    # Some of it: on a busy machine the first samples of a server end before the last ones have reached it.
    holding = await begin_running(engine, held)
    update = asyncio.create_task(engine.load_weights(image, 4, mode))
    await asyncio.sleep(0.01)
    next_holder = asyncio.create_task(engine.generate(a_request(max_new_tokens=3, holds_weights=True)))

    await update

    assert {completion.versions for completion in await holding} == {((0, 3),)}
    assert {completion.versions for completion in await next_holder} == {((0, 4),)}


async def test_an_image_that_is_none_leaves_the_old_version(engine: Engine, tmp_path: Path) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"\x10\0\0\0\0\0\0\0not a header")

    for image in (broken, tmp_path / "missing.safetensors"):
        with pytest.raises(WeightTransferFailed):
            await engine.load_weights(image, 4, OnWeightUpdate.DRAIN)

    assert (await engine.load()).version == 3
    assert [completion.versions for completion in await engine.generate(a_request())] == [((0, 3),)]


async def test_an_update_that_nobody_waits_for_is_dropped(engine: Engine, image: Path) -> None:
    running = await begin_running(engine, a_request(request_id="long", max_new_tokens=LONG), running=1)
    update = asyncio.create_task(engine.load_weights(image, 4, OnWeightUpdate.DRAIN))
    await asyncio.sleep(0)

    update.cancel()

    with pytest.raises(asyncio.CancelledError):
        await update
    await engine.abort("long")
    await running
    [completion] = await engine.generate(a_request())
    assert completion.versions == ((0, 3),)


async def test_closing_aborts_what_is_in_flight(make_engine: Callable[[], Engine]) -> None:
    engine = make_engine()
    await engine.start()
    running = await begin_running(engine, a_request(max_new_tokens=LONG), running=1)

    await engine.close()
    await engine.close()

    [completion] = await running
    assert completion.finish_reason is FinishReason.ABORTED
    with pytest.raises(WorkerDied):
        await engine.generate(a_request())


def prefix_of(completion: Completion, num: int) -> Prefix:
    """Cut what another engine would be handed after ``num`` tokens."""
    runs = tuple(run for run in completion.versions if run[0] < num)
    return Prefix(tuple(completion.token_ids[:num].tolist()), tuple(completion.log_probs[:num].tolist()), runs)


async def test_a_resumed_completion_is_the_one_that_was_not_interrupted(engine: Engine) -> None:
    needs(engine, EngineCapability.EXACT_RESUMPTION)
    whole = await engine.generate(a_request(seeds=(4, 5, 6, 7), max_new_tokens=20))
    prefixes = (prefix_of(whole[0], 1), None, prefix_of(whole[2], 19), prefix_of(whole[3], 7))

    resumed = await engine.generate(a_request(seeds=(4, 5, 6, 7), max_new_tokens=20, prefixes=prefixes))

    assert [each.num_resumed for each in resumed] == [1, 0, 19, 7]
    for each, uninterrupted in zip(resumed, whole, strict=True):
        assert each.token_ids.tolist() == uninterrupted.token_ids.tolist()
        np.testing.assert_allclose(each.log_probs, uninterrupted.log_probs, atol=1e-5)
        assert (each.versions, each.finish_reason) == (((0, 3),), FinishReason.LENGTH)


async def test_tokens_of_an_older_version_keep_it_where_versions_may_mix(engine: Engine, image: Path) -> None:
    [older] = await engine.generate(a_request(seeds=(4,), max_new_tokens=9))
    await engine.load_weights(image, 4, OnWeightUpdate.DRAIN)
    rule = ResumeRule(mixes_versions=True, max_lag=1)
    request = a_request(seeds=(4,), max_new_tokens=12, prefixes=[prefix_of(older, 5)], resume=rule)

    [resumed] = await engine.generate(request)

    assert resumed.versions == ((0, 3), (5, 4))
    assert resumed.token_ids[:5].tolist() == older.token_ids[:5].tolist()
    assert resumed.log_probs[:5].tolist() == older.log_probs[:5].tolist()
    assert (resumed.token_ids.size, resumed.num_resumed) == (12, 5)


@pytest.mark.parametrize("rule", [ResumeRule(), ResumeRule(mixes_versions=True, max_lag=0)], ids=["unmixed", "too old"])
async def test_tokens_that_may_not_stay_are_sampled_afresh(engine: Engine, image: Path, rule: ResumeRule) -> None:
    [older] = await engine.generate(a_request(seeds=(4,), max_new_tokens=9))
    await engine.load_weights(image, 4, OnWeightUpdate.DRAIN)
    [fresh] = await engine.generate(a_request(seeds=(4,), max_new_tokens=12))

    request = a_request(seeds=(4,), max_new_tokens=12, prefixes=[prefix_of(older, 5)], resume=rule)
    [again] = await engine.generate(request)

    if EngineCapability.SEEDED_SAMPLING in engine.capabilities:
        assert again.token_ids.tolist() == fresh.token_ids.tolist()
    assert again.token_ids.size == fresh.token_ids.size
    assert (again.versions, again.num_resumed) == (((0, 4),), 0)


async def test_resumed_tokens_are_not_mixed_by_an_update_that_comes_first(engine: Engine, image: Path) -> None:
    [older] = await engine.generate(a_request(seeds=(4,), max_new_tokens=9))
    running = await begin_running(engine, a_request(seeds=(1, 2), max_new_tokens=LONG), running=2)
    update = asyncio.create_task(engine.load_weights(image, 4, OnWeightUpdate.DRAIN))
    await asyncio.sleep(0.01)

    [resumed] = await engine.generate(a_request(seeds=(4,), max_new_tokens=12, prefixes=[prefix_of(older, 5)]))

    await asyncio.gather(update, running)
    assert (resumed.versions, resumed.num_resumed) == (((0, 4),), 0)


async def test_an_aborted_request_gives_back_what_it_came_with(engine: Engine) -> None:
    [begun] = await engine.generate(a_request(seeds=(4,), max_new_tokens=9))
    crowd = asyncio.create_task(engine.generate(a_request(seeds=range(SLOTS), request_id="crowd", max_new_tokens=LONG)))
    await until_running(engine, running=SLOTS)
    request = a_request(seeds=(3, 4), request_id="waiting", max_new_tokens=LONG, prefixes=[None, prefix_of(begun, 6)])
    waiting = asyncio.create_task(engine.generate(request))
    await asyncio.sleep(0)

    await engine.abort("waiting")
    await engine.abort("crowd")

    nothing, kept = await waiting
    assert (nothing.token_ids.size, nothing.finish_reason) == (0, FinishReason.ABORTED)
    assert kept.token_ids.tolist() == begun.token_ids[:6].tolist()
    assert (kept.versions, kept.num_resumed, kept.finish_reason) == (((0, 3),), 6, FinishReason.ABORTED)
    assert all(each.token_ids.size for each in await crowd)


@pytest.mark.parametrize(
    "prefix",
    [
        Prefix((), (), ((0, 3),)),
        Prefix((5,) * 8, (-1.0,) * 8, ((0, 3),)),
        Prefix((5, 6), (-1.0,), ((0, 3),)),
        Prefix((5,), (-1.0,), ()),
        Prefix((-1,), (-1.0,), ((0, 3),)),
    ],
    ids=["empty", "as long as allowed", "log-probs missing", "versions missing", "no token"],
)
async def test_a_prefix_that_is_none_is_refused(engine: Engine, prefix: Prefix) -> None:
    with pytest.raises(InvalidRequest, match="prefixes"):
        await engine.generate(a_request(max_new_tokens=8, prefixes=[prefix]))


async def test_an_engine_that_sleeps_ends_what_runs_and_refuses_what_comes(engine: Engine) -> None:
    needs(engine, EngineCapability.SLEEP)
    running = await begin_running(engine, a_request(seeds=(1, 2), max_new_tokens=LONG), running=2, new_tokens=10)

    await engine.sleep()
    await engine.sleep()

    assert {completion.finish_reason for completion in await running} == {FinishReason.ABORTED}
    with pytest.raises(Unavailable):
        await engine.generate(a_request())
    assert (await engine.load()).running == 0
    await engine.wake()


async def test_an_engine_wakes_with_the_weights_that_it_began_with(engine: Engine) -> None:
    needs(engine, EngineCapability.SLEEP)
    (before,) = await engine.generate(a_request(greedy=True))
    await engine.sleep()

    await engine.wake()
    await engine.wake()

    (after,) = await engine.generate(a_request(greedy=True))
    assert after.versions == ((0, 3),)
    assert after.token_ids.tolist() == before.token_ids.tolist()
    np.testing.assert_allclose(after.log_probs, before.log_probs, atol=1e-6)


async def test_new_weights_wake_an_engine(engine: Engine, image: Path, model_path: Path) -> None:
    needs(engine, EngineCapability.SLEEP)
    await engine.load_weights(image, 5, OnWeightUpdate.INTERRUPT)
    (never_slept,) = await engine.generate(a_request(greedy=True))
    await engine.load_weights(model_path / "model.safetensors", 4, OnWeightUpdate.DRAIN)
    await engine.sleep()
    transfer = engine.begin_transfer(image, 5)
    transfer.complete()

    await engine.load_weights(image, 5, OnWeightUpdate.DRAIN)

    (woken,) = await engine.generate(a_request(greedy=True))
    assert woken.versions == ((0, 5),)
    assert woken.token_ids.tolist() == never_slept.token_ids.tolist()
    np.testing.assert_allclose(woken.log_probs, never_slept.log_probs, atol=1e-6)


@pytest.mark.parametrize("mode", OnWeightUpdate)
async def test_what_waits_when_an_engine_goes_to_sleep_ends(
    engine: Engine, image: Path, mode: OnWeightUpdate, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(engine, EngineCapability.SLEEP)
    if isinstance(engine, ScriptedEngine):
        # Else it samples all of them within the sleeps below, where nothing keeps the machine from it.
        monkeypatch.setattr(engine, "token_seconds", 0.001)
    held = a_request(seeds=range(SLOTS), max_new_tokens=LONG, holds_weights=True)
    running = asyncio.create_task(engine.generate(held))
    await until_running(engine, running=SLOTS)
    update = asyncio.create_task(engine.load_weights(image, 4, mode))
    await asyncio.sleep(0.01)
    waiting = asyncio.create_task(engine.generate(a_request(max_new_tokens=3, holds_weights=True)))
    await asyncio.sleep(0.01)

    await engine.sleep()

    with pytest.raises(Unavailable):
        await update
    for ended in (await running, await waiting):
        assert {completion.finish_reason for completion in ended} == {FinishReason.ABORTED}
    await engine.wake()
    assert (await engine.load()).version == 3
