"""All that the tests before this one sent to real SGLang servers, put through SGLang's own request classes."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.contract.engine.conftest import python_of
from tests.servers.recording import files_asked_for, requests_of

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


@pytest.fixture
def checker() -> str:
    """A program that takes ``check RECORDS --protocol``, run by SGLang's interpreter with its sources."""
    path = os.environ.get("FLOTILLA_SGLANG_CHECKER")
    if not path or "sglang" not in files_asked_for():
        pytest.skip("FLOTILLA_SGLANG_CHECKER or FLOTILLA_SGLANG_RECORDS is not set")
    return path


def test_sglang_would_take_every_call_in_the_order_in_which_it_came(checker: str) -> None:
    python, records = python_of("sglang"), files_asked_for()["sglang"]
    sources = next(python.parents[1].glob("lib/python*/site-packages/sglang")).parent
    paths = {record["endpoint"] for record in requests_of(records)}

    checked = subprocess.run(
        [str(python), checker, "check", str(records), "--protocol"],
        capture_output=True,
        text=True,
        env={**os.environ, "SGLANG_SRC": str(sources)},
        cwd=Path(checker).parent,
    )

    refused = [line for line in checked.stdout.splitlines() if line.startswith("FAIL")]
    assert checked.returncode == 0, refused[:20] or checked.stderr[-2000:]
    assert {"/generate", "/abort_request", "/pause_generation", "/update_weights_from_disk"} <= paths
    print(checked.stdout.splitlines()[-1])
