"""What is said of a job of several ranks that ended."""

import signal
from dataclasses import make_dataclass

import pytest

from flotilla.services.trainer.job import launcher
from flotilla.services.trainer.job.launcher import END_SECONDS, cause_of, time_to_end
from flotilla.services.trainer.parallel.job import Place, is_lost_peer
from flotilla.shared.errors import ModelError


@pytest.mark.parametrize(
    ("codes", "cause"),
    [
        ({1: -signal.SIGKILL}, "rank 1 of 4 was ended by SIGKILL"),
        ({0: -signal.SIGTERM, 1: -signal.SIGKILL}, "rank 1 of 4 was ended by SIGKILL"),
        ({0: 4, 2: -signal.SIGSEGV, 3: 4}, "rank 2 of 4 was ended by SIGSEGV"),
        ({1: -signal.SIGKILL, 2: -signal.SIGKILL}, "rank 1 of 4 and rank 2 of 4 were ended by SIGKILL"),
        ({0: 1, 1: 4}, None),
        ({1: -signal.SIGTERM}, None),
    ],
)
def test_the_rank_that_a_signal_ended_is_named(codes: dict[int, int], cause: str | None) -> None:
    assert cause_of(codes, 4) == cause


def test_a_collective_that_failed_is_not_the_cause() -> None:
    assert is_lost_peer(RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer"))
    assert not is_lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_lost_peer(ModelError("packing"))


def test_a_process_outside_a_job_has_no_place() -> None:
    assert Place.of({"PATH": "/bin"}) is None
    told = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711"}
    assert Place.of(told) == Place(rank=1, size=2, local_rank=1, host="127.0.0.1", port=4711)


def test_ranks_have_some_seconds_to_end_where_torch_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert time_to_end() == {"shutdown_timeout": END_SECONDS}

    monkeypatch.setattr(launcher, "LaunchConfig", make_dataclass("Earlier", [("max_restarts", int)]))

    assert time_to_end() == {}
