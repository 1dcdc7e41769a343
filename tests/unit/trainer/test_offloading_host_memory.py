"""What is in the host's memory between its uses; here the host's memory is the device, too, and bits are the same."""

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from flotilla.services.trainer.learning.opening import make_learner
from flotilla.services.trainer.models import optimizer as optimizer_module
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.services.trainer.models.offloading import ParkedTensors
from flotilla.services.trainer.models.optimizer import PolicyOptimizer
from flotilla.services.trainer.parallel import fsdp
from flotilla.services.trainer.parallel.ranks import Ranks, backend_of
from flotilla.shared.config.sections.optimisation import OptimisationConfig
from flotilla.shared.config.sections.parallelism import OffloadConfig
from flotilla.shared.config.spec import ExperimentSpec
from tests.unit.trainer.builders import a_model, a_spec, uneven_groups

LARGE = 1 << 15
CONFIG = OptimisationConfig(steps=3, groups_per_mini_batch=1, learning_rate=1e-2, max_grad_norm=1.0)


def parameters() -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(0)
    return [(f"p{number}", nn.Parameter(torch.randn(2, LARGE))) for number in range(3)]


def trained(named: list[tuple[str, nn.Parameter]], optimizer: PolicyOptimizer, steps: range) -> None:
    for step in steps:
        for number, (_, parameter) in enumerate(named):
            parameter.grad = torch.full_like(parameter, 0.1 * (number + step + 1)) * parameter.detach().sign()
        optimizer.update()


def test_parked_tensors_take_no_memory_and_come_back_as_they_were() -> None:
    tensor = torch.randn(LARGE)
    view, expected = tensor[1:3], tensor.clone()

    parked = ParkedTensors([tensor])

    assert tensor.untyped_storage().nbytes() == 0
    assert torch.equal(parked.on_host(tensor), expected) and torch.equal(parked.on_host(view), expected[1:3])
    with parked.on_device():
        assert torch.equal(tensor, expected)
        tensor += 1
    assert torch.equal(parked.on_host(tensor), expected + 1)


def test_what_is_constant_is_not_copied_back() -> None:
    tensor = torch.zeros(LARGE)
    parked = ParkedTensors([tensor], is_constant=True)

    with parked.on_device():
        tensor += 1

    assert torch.equal(parked.on_host(tensor), torch.zeros(LARGE))


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 30])
def test_a_step_that_is_streamed_is_the_same_to_the_bit(bucket_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module, "BUCKET_BYTES", bucket_bytes)
    usual, streamed = parameters(), parameters()
    before = PolicyOptimizer(usual, CONFIG, 3)
    optimizer = PolicyOptimizer(streamed, CONFIG, 3, is_offloaded=True)
    for named, each in ((usual, before), (streamed, optimizer)):
        trained(named, each, range(2))

    moments = [value for state in optimizer._adam.state.values() for key, value in state.items() if key != "step"]
    assert len(moments) == 6 and all(each.untyped_storage().nbytes() == 0 for each in moments)
    expected, found = before.state(), optimizer.state()
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)

    again = parameters()
    for (_, parameter), (_, other) in zip(again, streamed, strict=True):
        parameter.data.copy_(other.data)
    resumed = PolicyOptimizer(again, CONFIG, 3, is_offloaded=True)
    resumed.load(found, 2)
    for named, each in ((usual, before), (streamed, optimizer), (again, resumed)):
        trained(named, each, range(2, 3))
    for (_, one), (_, two), (_, three) in zip(usual, streamed, again, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)


def test_moments_that_begin_after_updates_without_a_gradient_are_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A critic's warm-up updates the policy without a gradient, and an expert may get its first one later still."""
    monkeypatch.setattr(optimizer_module, "BUCKET_BYTES", 1 << 30)
    usual, streamed = parameters(), parameters()
    before = PolicyOptimizer(usual, CONFIG, 5)
    optimizer = PolicyOptimizer(streamed, CONFIG, 5, is_offloaded=True)
    for named, each in ((usual, before), (streamed, optimizer)):
        each.update()
        trained(named[:1], each, range(1, 2))
        trained(named, each, range(2, 4))

    moments = [value for state in optimizer._adam.state.values() for key, value in state.items() if key != "step"]
    assert len(moments) == 6 and all(each.untyped_storage().nbytes() == 0 for each in moments)
    expected, found = before.state(), optimizer.state()
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)


def offloading(spec: ExperimentSpec, **chosen: bool) -> ExperimentSpec:
    """Offload as no spec may on a CPU."""
    parallelism = spec.parallelism.model_copy(update={"offload": OffloadConfig(**chosen)})
    return spec.model_copy(update={"parallelism": parallelism})


def test_a_reference_that_is_on_its_device_for_its_pass_alone_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla.services.trainer.models.offloading.LEAST_BYTES", 1)
    spec = a_spec(algorithm={"kl": {"placement": "loss"}}, optimisation={"groups_per_mini_batch": 2})
    figures, references = [], []
    for each in (spec, offloading(spec, reference=True, optimiser=True)):
        learner = make_learner(each, LoadedModel(a_model(), cast(Any, None)), LoadedModel(a_model(), cast(Any, None)))
        figures.append([learner.train(uneven_groups(seed=step), step).metrics["loss/total"] for step in (1, 2)])
        assert learner.reference is not None
        references.append(sum(each.untyped_storage().nbytes() for each in learner.reference.model.parameters()))

    assert figures[0] == figures[1]
    assert references[0] > 0 and references[1] == 0


def test_layers_are_sharded_with_their_weights_in_the_host_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(fsdp, "fully_shard", lambda _module, **arguments: calls.append(arguments))

    class Mesh(dict[Any, Any]):
        def size(self) -> int:
            return 2

    mesh: Any = Mesh()
    for axis in ("replicate", "shard"):
        mesh[axis] = Mesh()
    mesh["replicate", "shard"] = Mesh()
    for offloads in (False, True):
        ranks = Ranks(0, 4, mesh, device=torch.device("cuda", 0), offloads_parameters=offloads)
        fsdp.shard(a_model(), ranks)

    half = len(calls) // 2
    assert half > 1 and all("offload_policy" not in call for call in calls[:half])
    policies = [call["offload_policy"] for call in calls[half:]]
    assert len(policies) == half
    assert all(isinstance(each, CPUOffloadPolicy) and each.pin_memory for each in policies)


def test_gradients_in_the_host_s_memory_have_a_group_of_their_own() -> None:
    cuda = torch.device("cuda", 0)

    assert backend_of(cuda, offloads_parameters=True) == "cpu:gloo,cuda:nccl"
    assert backend_of(cuda, offloads_parameters=False) == "nccl"
    assert backend_of(torch.device("cpu"), offloads_parameters=False) == "gloo"
