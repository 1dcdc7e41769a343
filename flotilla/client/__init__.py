"""The Python client of a fleet: typed, and the same for scripts, notebooks and asynchronous programs.

    import flotilla

    with flotilla.Client() as client:                       # the local fleet of ./.flotilla, or FLOTILLA_GATEWAY_URL
        run = client.create("experiment.yaml", overrides={"optimisation.steps": 20}, start=True)
        client.wait(run.id)
        print([point.value for point in client.metrics(run.id, ["evaluation/accuracy"])])

An experiment is named by its id, or by its name where only one has it. Calls are repeated while the gateway is absent,
for ``deadline_seconds`` at most; every wait has a deadline of its own. Errors are those of ``flotilla.shared.errors``.
"""

from flotilla.client.asynchronous import AsyncClient, Ledgers, Spec
from flotilla.client.synchronous import Client
from flotilla.client.views import Experiment, Experiments, Metrics

__all__ = ["AsyncClient", "Client", "Experiment", "Experiments", "Ledgers", "Metrics", "Spec"]
