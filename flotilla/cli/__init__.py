"""The ``flotilla`` command: fleets on this machine, experiments on any."""
