"""The client for scripts and notebooks: the asynchronous one, on a thread of its own."""

from flotilla.client.asynchronous import AsyncClient
from flotilla.client.blocking import following, waiting
from flotilla.client.fleet import BlockingFleetCalls


class Client(BlockingFleetCalls):
    """The same without ``await``, for scripts and notebooks; each method is that of :class:`AsyncClient`.

    The calls run on an event loop of its own thread, so it works inside a running loop, as in a notebook. Use it as a
    context manager, or ``close`` it; the end of the process closes it, too.
    """

    client_class = AsyncClient

    create = waiting(AsyncClient.create)
    experiments = waiting(AsyncClient.experiments)
    experiment = waiting(AsyncClient.experiment)
    start = waiting(AsyncClient.start)
    pause = waiting(AsyncClient.pause)
    resume = waiting(AsyncClient.resume)
    extend = waiting(AsyncClient.extend)
    fork = waiting(AsyncClient.fork)
    stop = waiting(AsyncClient.stop)
    change = waiting(AsyncClient.change)
    delete = waiting(AsyncClient.delete)
    wait = waiting(AsyncClient.wait)
    ledger = waiting(AsyncClient.ledger)
    metrics = waiting(AsyncClient.metrics)
    metric_page = waiting(AsyncClient.metric_page)
    follow_metrics = following(AsyncClient.follow_metrics)
    plot = waiting(AsyncClient.plot)
    fetch_model = waiting(AsyncClient.fetch_model)
    diagnosis = waiting(AsyncClient.diagnosis)
    checkpoints = waiting(AsyncClient.checkpoints)
    check_copy = waiting(AsyncClient.check_copy)
    samples = waiting(AsyncClient.samples)
    events = following(AsyncClient.events)
