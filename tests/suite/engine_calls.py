"""Writes down the calls to engines' servers where the environment asks for it; see ``tests.servers.recording``."""

import os
from collections.abc import Generator

import pytest

VARIABLES = frozenset({"FLOTILLA_SGLANG_RECORDS", "FLOTILLA_VLLM_RECORDS"})


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Generator[None, object, object]:
    if VARIABLES.isdisjoint(os.environ):
        return (yield)
    from tests.servers.recording import files_asked_for, recording

    with recording(files_asked_for()):
        return (yield)
