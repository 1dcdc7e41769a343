"""Layers that are compiled, or whose activations are on the host, compute what they did under the same names."""

import importlib.machinery
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models import loading
from flotilla.services.trainer.models.loading import PACKAGES, LoadedModel, apply_kernels, check_attention, load_model
from flotilla.services.trainer.parallel import layers
from flotilla.services.trainer.parallel.layers import check_compiler, keep_activations_on_host, recompute_activations
from flotilla.shared.config.sections.model import ModelConfig
from flotilla.shared.errors import ModelError
from tests.unit.trainer.builders import a_model, a_spec, uneven_groups

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
IDS = torch.arange(32)[None].repeat(16, 1)


def gradients(prepare: Callable[[nn.Module], None]) -> tuple[dict[str, torch.Tensor], int]:
    """Make one backward pass of a model; gradients by name, and how many tensors its layers keep on the host."""
    model = a_model(hidden_size=64, num_hidden_layers=3)
    prepare(model)
    kept: list[int] = []
    real = torch.empty

    def counted(*given: Any, **named: Any) -> torch.Tensor:
        kept.extend([1] * ("pin_memory" in named))
        return real(*given, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "empty", counted)
        model(input_ids=IDS, use_cache=False).logits.square().mean().backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}, len(kept)


def on_host(model: nn.Module) -> None:
    keep_activations_on_host(model, "cpu")


def twice_and_on_host(model: nn.Module) -> None:
    recompute_activations(model)
    keep_activations_on_host(model, "cpu")


def test_activations_on_the_host_give_the_same_gradients_to_the_bit() -> None:
    plain, none = gradients(lambda _: None)
    hosted, many = gradients(on_host)
    both, few = gradients(twice_and_on_host)

    assert (none, few) == (0, 3), "beside checkpointing the input of each layer"
    assert many > 10
    for found in (hosted, both):
        assert found.keys() == plain.keys()
        assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_a_model_without_layers_has_no_activations_to_move() -> None:
    with pytest.raises(ModelError, match=r"parallelism.offload.activations: Linear does not declare"):
        keep_activations_on_host(nn.Linear(2, 2), "cpu")


def test_a_pass_without_gradient_keeps_nothing() -> None:
    model = a_model()
    keep_activations_on_host(model, "cpu")

    with torch.no_grad():
        expected = a_model()(input_ids=IDS, use_cache=False).logits
        assert torch.equal(model(input_ids=IDS, use_cache=False).logits, expected)


@pytest.mark.long
@pytest.mark.timeout(600)
# The compiler looks at the gradients of what it traces.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("recomputes", [False, True])
def test_compiled_layers_learn_the_same(recomputes: bool) -> None:
    found = []
    for compiles in (False, True):
        spec = a_spec(
            algorithm={"old_log_probs": "recompute", "advantage": {"kind": "gae"}},
            optimisation={
                "steps": 2,
                "groups_per_mini_batch": 2,
                "learning_rate": 1e-2,
                "epsilon": 1.0,
                "compile_layers": compiles,
                "activation_checkpointing": recomputes,
            },
            asynchrony={"require_batches": 2},
        )
        learner = Learner(spec, LoadedModel(a_model(), Path()))
        losses = [learner.train(uneven_groups(seed=step), step).metrics["loss/total"] for step in (1, 2)]
        found.append((losses, learner.weights.copies(as_published=False)["float32"], learner.weights.layout))

    (expected, weights, names), (losses, compiled, compiled_names) = found
    assert losses == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(compiled, weights, atol=1e-5, rtol=0)
    assert compiled_names == names, "the names of the weights stay"


def test_without_a_compiler_compiled_layers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def fails() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", fails)
    monkeypatch.setattr(layers, "find_spec", lambda _: None)

    with pytest.raises(ModelError, match=r"optimisation.compile_layers: .* a C\+\+ compiler"):
        check_compiler(CPU)
    with pytest.raises(ModelError, match="needs Triton"):
        check_compiler(GPU)


def test_every_attention_of_the_spec_is_one_of_transformers() -> None:
    names = set(ModelConfig.model_fields["attention"].annotation.__args__) - {"auto", "eager"}  # type: ignore[union-attr]

    assert names <= set(ALL_ATTENTION_FUNCTIONS.valid_keys())
    assert set(PACKAGES) <= names


@pytest.mark.parametrize("name", PACKAGES)
def test_attention_that_cannot_compute_here_is_refused_with_its_reason(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match=rf"model.attention: {name} computes on GPUs"):
        check_attention(name, CPU)
    with pytest.raises(ModelError, match=f"{name} needs the package flash-attn"):
        check_attention(name, GPU)
    monkeypatch.setattr(loading, "find_spec", lambda _: importlib.machinery.ModuleSpec("x", None))
    check_attention(name, GPU)


def a_liger(monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]]) -> None:
    """Put a package in the place of liger-kernel that notes how it is called."""

    def apply_liger_kernel_to_qwen3(
        rope: bool = True,
        cross_entropy: bool = False,
        fused_linear_cross_entropy: bool = True,
        model: nn.Module | None = None,
    ) -> None:
        calls.append({"rope": rope, "own": (cross_entropy, fused_linear_cross_entropy), "model": model})

    module: Any = types.ModuleType("liger_kernel.transformers.monkey_patch")
    module.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": apply_liger_kernel_to_qwen3}
    package = types.ModuleType("liger_kernel")
    package.__spec__ = importlib.machinery.ModuleSpec("liger_kernel", None)
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", module)


def test_ligers_kernels_are_applied_to_the_model_without_its_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    a_liger(monkeypatch, calls)
    model = a_model()

    apply_kernels("liger", model, GPU)

    assert calls == [{"rope": True, "own": (False, False), "model": model}]


def test_ligers_kernels_are_refused_where_they_cannot_be_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"model.kernels: liger computes on GPUs"):
        apply_kernels("liger", a_model(), CPU)
    with pytest.raises(ModelError, match="needs the package liger-kernel"):
        apply_kernels("liger", a_model(), GPU)
    a_liger(monkeypatch, [])
    model = a_model()
    model.config.model_type = "gpt2"
    with pytest.raises(ModelError, match="none for models of type gpt2"):
        apply_kernels("liger", model, GPU)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_a_model_attends_as_it_is_said(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_model().save_pretrained(tmp_path)
    monkeypatch.setattr("flotilla.services.trainer.models.loading.check_directory", lambda _: None)
    monkeypatch.setattr(
        "flotilla.services.trainer.models.loading.AutoTokenizer.from_pretrained",
        lambda *_, **__: types.SimpleNamespace(),
    )

    whole, in_parts = (
        load_model(tmp_path, dtype="float32", device=CPU, in_parts=parts, attention=name).model
        for parts in (False, True)
    )

    assert [each.config._attn_implementation for each in (whole, in_parts)] == [name, name]  # type: ignore[union-attr]
