"""How long the files of the suite take: who hands out files begins with the longest, and slots are dealt by it."""

from collections.abc import Mapping

from tests.suite.rotation import SECONDS

BY_DAY: Mapping[str, int] = {
    # Fleets, which half of the workers run.
    "tests/faults/test_injected.py": 113,
    "tests/faults/test_stores_disagree.py": 109,
    "tests/e2e/test_learns.py": 79,
    "tests/e2e/test_run.py": 55,
    "tests/e2e/test_bad_input.py": 49,
    "tests/e2e/test_documented_commands.py": 46,
    "tests/e2e/test_exactness.py": 31,
    # All others.
    "tests/integration/gateway/test_faults.py": 154,
    "tests/integration/trainer/test_processes.py": 130,
    "tests/integration/trainer/test_ranks.py": 115,
    "tests/integration/trainer/test_going_on.py": 79,
    "tests/integration/gateway/test_agents.py": 73,
    "tests/integration/trainer/test_hosts.py": 72,
    "tests/pairs/test_training.py": 69,
    "tests/pairs/test_engine.py": 60,
    "tests/integration/gateway/test_prompt_lengths.py": 56,
    "tests/integration/weights/test_endpoint.py": 55,
    "tests/integration/weights/test_sources.py": 55,
    "tests/pairs/test_agents.py": 50,
    "tests/contract/engine/test_engine_contract.py": 45,
    "tests/contract/children/test_calls.py": 40,
    "tests/integration/trainer/test_lora_ranks.py": 44,
    "tests/integration/gateway/test_hub_model.py": 40,
    "tests/integration/gateway/test_hub.py": 40,
    "tests/integration/gateway/test_http.py": 38,
    "tests/integration/trainer/test_small_streams.py": 39,
    "tests/integration/streams/test_refusals.py": 32,
    "tests/integration/gateway/test_refusals.py": 29,
    "tests/integration/weights/test_engine_group.py": 29,
    "tests/integration/trainer/test_finished_answers.py": 28,
    "tests/integration/trainer/test_from_dump.py": 24,
    "tests/unit/algorithms/test_objective_properties.py": 28,
    "tests/unit/examples/test_pages.py": 26,
    "tests/unit/trainer/test_distillation.py": 26,
    "tests/unit/trainer/test_learner.py": 24,
}
"""Seconds of a file without its long tests, of files that take many: on two cores with a load of 6 to 13, alone on one
worker, so that only their order means something. The table at the end of a run has the figures."""


def seconds_of(nodeid: str) -> int:
    """Say how long the file of a test takes, with the long tests of its turn; 0 where that is not long.

    A turn has the longest files of all: handed out last, they would be all that runs at the end.
    """
    file = nodeid.partition("::")[0]
    return BY_DAY.get(file, 0) + SECONDS.get(file, 0)
