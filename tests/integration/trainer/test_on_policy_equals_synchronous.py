"""With T = 1 and eta = 0 the fleet must train exactly what a loop in one process trains."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.streams.memory.plane import MemoryDataPlane
from tests.integration.trainer.fleet import YesGateway, a_spec, answer, save_tiny_model, task_of, train

TOLERANCE = 1e-5
EPSILON = 1e-4
"""Large, since AdamW divides by a gradient's size: by default, one of rounding noise would become a whole update."""


def synchronous_training(spec: ExperimentSpec) -> tuple[list[float], Qwen3ForCausalLM]:
    """GRPO as plainly as possible: sample, compare in the group, one padded pass, one update."""
    model = Qwen3ForCausalLM.from_pretrained(spec.model.path).eval()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=spec.optimisation.learning_rate, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.0
    )
    losses = []
    for step in range(spec.optimisation.steps):
        ids = range(step * spec.groups_per_step, (step + 1) * spec.groups_per_step)
        groups = [answer(model, task_of(number, spec, step), step, 10) for number in ids]
        advantages, rows = [], []
        for group in groups:
            rewards = torch.tensor([t.reward for t in group.trajectories])
            advantages += ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()
            rows += list(group.trajectories)
        width = max(len(t.token_ids) for t in rows)
        tokens, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width)
        old = torch.zeros(len(rows), width)
        for number, t in enumerate(rows):
            length = len(t.token_ids)
            tokens[number, :length] = torch.tensor(t.token_ids)
            mask[number, :length] = torch.tensor(t.loss_mask)
            old[number, :length] = torch.tensor(t.log_probs)
        attention = (torch.arange(width) < torch.tensor([len(t.token_ids) for t in rows])[:, None]).long()
        logits = model(tokens, attention_mask=attention).logits[:, :-1]
        log_probs = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        ratio = (log_probs - old[:, 1:]).exp()
        advantage = torch.tensor(advantages)[:, None]
        per_token = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
        loss = (per_token * mask[:, 1:]).sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize(
    "optimisation",
    [
        {"packing": "auto"},
        {"packing": "packed", "micro_batch_tokens": 64},
        {"packing": "padded", "micro_batch_tokens": 48},
    ],
    ids=["auto", "packed", "padded"],
)
async def test_five_steps_agree_with_a_synchronous_loop(tmp_path: Path, optimisation: dict[str, object]) -> None:
    model = save_tiny_model(tmp_path / "model")
    spec = a_spec(
        model,
        optimisation={"steps": 5, "groups_per_mini_batch": 4, "learning_rate": 1e-3, "epsilon": EPSILON} | optimisation,
        checkpoint={"every_steps": 5},
    )
    plane = MemoryDataPlane()
    gateway = YesGateway(plane)

    is_finished = await train(spec, tmp_path / "run", plane, gateway)

    losses, expected = synchronous_training(spec)
    assert is_finished
    assert gateway.published == [1, 2, 3, 4, 5]
    found = Qwen3ForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step-00000005" / "model")
    for step, loss in enumerate(losses, start=1):
        assert gateway.metrics[step]["loss/total"] == pytest.approx(loss, abs=TOLERANCE)
        assert gateway.metrics[step]["lag/max"] == 0
    for (name, parameter), (_, reference) in zip(found.named_parameters(), expected.named_parameters(), strict=True):
        torch.testing.assert_close(parameter, reference, atol=TOLERANCE, rtol=0, msg=name)
    ledger = await plane.ledger()
    assert ledger.balanced
    assert (ledger.trained, ledger.planned) == (20, 0)
