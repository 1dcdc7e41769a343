"""The part of ``benchmarks.gpu`` that goes on from what was saved: an optimiser, and a whole run."""

import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.gpu_fleets import run_fleet, write_experiment
from benchmarks.gpu_place import Figures, Found, Place, attempted
from flotilla.services.trainer.models.optimizer import PolicyOptimizer
from flotilla.shared.config.sections.optimisation import OptimisationConfig

UPDATES = 4
LEAST_WIDTH = 256


def part_resume(place: Place) -> Found:
    """Go on from an optimiser's state and from a run's checkpoint."""
    for is_offloaded in (False, True):
        name = "optimiser, moments on the host" if is_offloaded else "optimiser"
        yield name, attempted(partial(resumed_optimiser, place, is_offloaded=is_offloaded))
        place.free()
    yield "fleet", attempted(partial(continued_fleet, place))


def resumed_optimiser(place: Place, *, is_offloaded: bool) -> Figures:
    """Save an optimiser half-way, load it beside a copy of its weights, and go on with both: to the same bits."""
    config = OptimisationConfig(steps=UPDATES, learning_rate=1e-3)
    layer, copy = a_layer(place), a_layer(place)
    optimizer = PolicyOptimizer(layer.named_parameters(), config, UPDATES, is_offloaded=is_offloaded)
    advance(layer, optimizer, range(UPDATES // 2))
    saved = {name: tensor.cpu().clone() for name, tensor in optimizer.state().items()}
    copy.load_state_dict(layer.state_dict())
    resumed = PolicyOptimizer(copy.named_parameters(), config, UPDATES, is_offloaded=is_offloaded)
    resumed.load(saved, optimizer.updates)
    for each, of in ((layer, optimizer), (copy, resumed)):
        advance(each, of, range(UPDATES // 2, UPDATES))
    place.finish()
    pairs = zip(layer.parameters(), copy.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs), "the resumed optimiser went another way"
    return {"updates": resumed.updates, "tensors": len(saved), "same_bits": True}


def a_layer(place: Place) -> nn.Linear:
    """Make a layer of the first model's width on the device, and no smaller than what is parked on the host."""
    width = max(next(iter(place.shapes.values())).hidden, LEAST_WIDTH)
    torch.manual_seed(0)
    return nn.Linear(width, width, device=place.device, dtype=place.torch_dtype)


def advance(layer: nn.Linear, optimizer: PolicyOptimizer, updates: range) -> None:
    """Take updates whose gradients depend on their number and on the weights alone."""
    for number in updates:
        for parameter in layer.parameters():
            parameter.grad = parameter.detach().sign() * 0.1 * (number + 1)
        optimizer.collect()
        optimizer.update()


def continued_fleet(place: Place) -> Figures:
    """End a run, and let it go on from its checkpoint for as many steps again."""
    with tempfile.TemporaryDirectory() as folder:
        spec = write_experiment(place, Path(folder))
        steps = place.fleet.short_steps
        figures = {}
        for name, of_all in (("first", steps), ("continued", 2 * steps)):
            chosen = {**spec, "optimisation": {**spec["optimisation"], "steps": of_all}}
            figures[name] = run_fleet(place, Path(folder), chosen, "resume", continues=name == "continued")
            if "failed" in figures[name]:
                return figures
        first, all_losses = figures["first"]["losses"], figures["continued"]["losses"]
        assert all_losses[:steps] == first, f"the run began again: {first} is not the beginning of {all_losses}"
        assert len(all_losses) == 2 * steps, all_losses
        return figures
