"""Processes that a killed test process has left behind, found by a variable of the environment that they inherited."""

import psutil


def kill_marked(**variables: str) -> list[int]:
    """Kill -9 every process whose environment has all these values; returns their ids."""
    killed = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if all(environment.get(name) == value for name, value in variables.items()):
                process.kill()
                killed.append(process.pid)
        except psutil.Error:
            continue
    return killed
