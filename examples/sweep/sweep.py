"""Three learning rates, compared. Needs a fleet: `flotilla up --detach`. With `--trainers 3` they run side by side."""

import argparse
from pathlib import Path

import flotilla

ARITHMETIC = Path(__file__).parents[1] / "arithmetic" / "experiment.yaml"


def sweep(spec: Path, rates: list[float], steps: int, plot: str) -> float:
    """Train once per learning rate, plot the rewards, fetch the best model; returns the best rate."""
    with flotilla.Client() as client:
        runs = {}
        for rate in rates:
            changes = {"name": f"rate-{rate:g}", "optimisation.learning_rate": rate, "optimisation.steps": steps}
            runs[rate] = client.create(spec, overrides=changes, start=True).id
        for run in runs.values():
            print(client.wait(run).state, run)
        client.plot(list(runs.values()), "reward/mean").savefig(plot)
        best = max(rates, key=lambda rate: client.metrics(runs[rate], ["reward/mean"])[-1].value)
        print(f"best: {best:g}, its model: {client.fetch_model(runs[best])}")
    return best


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", type=Path, default=ARITHMETIC, help="experiment file")
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-5, 1e-4, 3e-4])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--plot", default="sweep.png")
    arguments = parser.parse_args()
    sweep(arguments.spec, arguments.rates, arguments.steps, arguments.plot)
