"""A fleet in one process around the real trainer: a sampler that is written plainly, a gateway that only says yes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from flotilla.services.trainer.worker.control import RunControl
from flotilla.services.trainer.worker.session import Session, SessionDeps, open_session
from flotilla.shared.checkpoints.lineage import INITIAL, Published, reconcile
from flotilla.shared.checkpoints.takeover import TakeoverAnswer, TakeoverRequest
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import StalePolicyVersion
from flotilla.shared.schemas.publication import Publication, PublicationPhase, PublicationRequest
from flotilla.shared.schemas.service import Failure, WorkState
from flotilla.shared.schemas.task import Message, Task, sample_seed
from flotilla.shared.schemas.trajectory import FinishReason, GradeStatus, Group, Trajectory
from flotilla.shared.streams.admission import IssueOutcome
from flotilla.shared.streams.hop import HopName
from flotilla.shared.streams.memory.plane import MemoryDataPlane

VOCABULARY = 48
END = 1


def save_tiny_model(directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random Qwen3 of 2 layers, with a tokenizer of one token per number."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=True,
        eos_token_id=END,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).to(dtype).save_pretrained(directory)
    words = {"<pad>": 0, "<end>": END} | {str(number): number for number in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>").save_pretrained(directory)
    return directory


def a_spec(model: Path, **sections: Mapping[str, Any]) -> ExperimentSpec:
    """Make a small spec; sections are merged into the defaults."""
    document: dict[str, Any] = {
        "name": "tiny",
        "seed": 7,
        "model": {"path": str(model)},
        "data": {"path": "unused.jsonl"},
        "rollout": {"group_size": 4, "sampling": {"max_new_tokens": 10}},
        "reward": {"components": [{"kind": "exact"}]},
        "optimisation": {"steps": 5, "groups_per_mini_batch": 4, "learning_rate": 1e-3},
        "asynchrony": {"staleness_threshold": 0},
        "checkpoint": {"every_steps": 2},
    }
    for name, values in sections.items():
        document[name] = document.get(name, {}) | dict(values)
    return validate_spec(document)


def prompt_of(group_id: int) -> list[int]:
    """Make a prompt that depends on the group alone, of 3 to 8 tokens."""
    generator = np.random.default_rng(group_id)
    return [int(token) for token in generator.integers(2, VOCABULARY, generator.integers(3, 9))]


def reward_of(completion: list[int]) -> float:
    """Reward the share of even tokens."""
    return sum(token % 2 == 0 for token in completion) / len(completion)


@torch.no_grad()
def sample(
    model: Qwen3ForCausalLM, prompt: list[int], seeds: list[int], limit: int
) -> list[tuple[list[int], list[float]]]:
    """Sample one completion per seed, token by token without any cache; gives tokens and their log-probabilities."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    tokens = torch.tensor([prompt] * len(seeds))
    log_probs = torch.zeros(len(seeds), 0)
    for _ in range(limit):
        log_all = torch.log_softmax(model(tokens).logits[:, -1].float(), -1)
        rows = zip(log_all.exp(), generators, strict=True)
        drawn = torch.stack([torch.multinomial(row, 1, generator=generator) for row, generator in rows])
        tokens = torch.cat([tokens, drawn], 1)
        log_probs = torch.cat([log_probs, log_all.gather(1, drawn)], 1)
    completions = []
    for sampled, of_sampled in zip(tokens[:, len(prompt) :].tolist(), log_probs.tolist(), strict=True):
        length = sampled.index(END) + 1 if END in sampled else limit
        completions.append((sampled[:length], of_sampled[:length]))
    return completions


def answer(model: Qwen3ForCausalLM, task: Task, version: int, limit: int) -> Group:
    """Sample and grade a task's group."""
    prompt = prompt_of(task.group_id)
    made = []
    seeds = [sample_seed(task.seed, index) for index in range(task.group_size)]
    for completion, log_probs in sample(model, prompt, seeds, limit):
        made.append(
            Trajectory(
                token_ids=np.array(prompt + completion, dtype=np.int32),
                loss_mask=np.array([0] * len(prompt) + [1] * len(completion), dtype=np.uint8),
                log_probs=np.array([0.0] * len(prompt) + log_probs, dtype=np.float32),
                versions=((0, version),),
                finish_reason=FinishReason.STOP,
            ).graded(GradeStatus.SCORED, reward_of(completion))
        )
    return Group(task, tuple(made))


def task_of(group_id: int, spec: ExperimentSpec, version: int) -> Task:
    """Make the task with this id."""
    return Task(
        group_id=group_id,
        row=group_id,
        messages=(Message("user", str(group_id)),),
        group_size=spec.rollout.group_size,
        seed=1000 + group_id,
        min_version=version,
    )


class YesGateway:
    """Commits every publication at once, since it has no members, and remembers what it is told."""

    def __init__(self, plane: Any) -> None:
        self.plane = plane
        self.spec: Any = None
        self.version = 0
        self.committed = INITIAL
        self.published: list[int] = []
        self.takeovers: list[TakeoverAnswer] = []
        self.metrics: dict[int, dict[str, float]] = {}
        self.checkpoints: list[int] = []
        self.images: dict[int, bytes] = {}

    async def begin_at(self, version: int) -> None:
        """Take a version for that which an experiment begins with, as its record does; for a later one nothing."""
        if self.version < version:
            self.version, self.committed = version, Published(version, 0)
            await self.plane.admission.published(version)

    async def call(self, method: str, path: str, *, body: Any = None, params: Any = None, **_: Any) -> Any:
        """Answer like the gateway's routes."""
        if path.endswith("/metrics"):
            self.metrics[body.step] = dict(body.values)
            return None
        if path.endswith("/checkpoints"):
            self.checkpoints.append(body.step)
            return None
        if isinstance(body, TakeoverRequest):
            return self._taken_over(body).model_dump(mode="json")
        assert isinstance(body, PublicationRequest), (method, path)
        version = body.manifest.version
        if version <= self.version:
            raise StalePolicyVersion(f"version {version} is not newer than {self.version}")
        self.version, self.committed = version, Published(version, body.step)
        self.published.append(version)
        await self.plane.admission.published(version)
        return Publication(
            experiment_id="e",
            version=version,
            epoch=1,
            phase=PublicationPhase.COMMITTED,
            members=(),
            deadline_seconds=5.0,
        ).model_dump(mode="json")

    def _taken_over(self, request: TakeoverRequest) -> TakeoverAnswer:
        decided = reconcile(
            request.standing(),
            self.committed,
            self.version,
            steps_per_version=self.spec.steps_per_version,
            total_steps=self.spec.optimisation.steps,
        )
        self.takeovers.append(TakeoverAnswer.of(decided))
        return self.takeovers[-1]

    async def on_image(self, version: int, path: Path, checksum: str) -> None:
        """Pull a version as soon as it can be pulled."""
        self.images[version] = path.read_bytes()


class NoEndpoint:
    """A weight group that nobody joins."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was called without members")


class ScriptedFleet:
    """Feeder, rollout and reward as one task on a plane: fills the budget, samples under the current version."""

    def __init__(self, spec: ExperimentSpec, plane: Any, gateway: YesGateway) -> None:
        self.spec, self.plane, self.gateway = spec, plane, gateway
        self.model = Qwen3ForCausalLM.from_pretrained(spec.model.path).eval()
        self.model_version = 0
        self._tasks, self._generated = plane.hop(HopName.TASKS, "rollout"), plane.hop(HopName.GENERATED, "reward")
        self.ends_before: int | None = None
        """Group that is not issued, nor any later one, while this stands: a trainer goes so far and no further."""

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            await self.turn()

    async def turn(self) -> None:
        """Issue what may be issued, answer one task, grade what was answered."""
        if self.gateway.version and self.gateway.version not in self.gateway.images:
            # What training begins with is published before anything is sampled.
            await asyncio.sleep(0.01)
            return
        await self._fill()
        for claim in await self._tasks.claim(1, wait_seconds=0.02):
            self._load_newest()
            group = answer(self.model, claim.task(), self.model_version, self.spec.rollout.sampling.max_new_tokens)
            await self._tasks.forward(claim, group)
        for claim in await self._generated.claim(16, wait_seconds=0.0):
            await self._generated.forward(claim, claim.group())

    async def _fill(self) -> None:
        while True:
            number = await self.plane.admission.next_group_id()
            if self.ends_before is not None and number >= self.ends_before:
                return
            task = task_of(number, self.spec, self.gateway.version)
            issued = await self.plane.admission.issue(task, limit=self.spec.admission_budget)
            if issued.outcome is not IssueOutcome.ISSUED:
                return

    def _load_newest(self) -> None:
        if self.gateway.version == self.model_version:
            return
        self.model.load_state_dict(load(self.gateway.images[self.gateway.version]), strict=False)
        self.model_version = self.gateway.version


@contextlib.asynccontextmanager
async def a_session(
    spec: ExperimentSpec, directory: Path, plane: Any, gateway: YesGateway, **surroundings: Any
) -> AsyncIterator[tuple[Session, RunControl]]:
    """Open the trainer's session as the worker process does."""
    gateway.spec = spec
    await gateway.begin_at(spec.first_version)
    states: list[WorkState] = []
    failures: list[Failure] = []
    control = RunControl(states.append)
    around = SessionDeps(
        **(
            {
                "experiment_id": "e",
                "service_id": "trainer",
                "directory": directory,
                "incarnation": None,
                "gateway": gateway,
                "endpoint": NoEndpoint(),
                "plane": plane,
                "on_image": gateway.on_image,
                "on_failure": failures.append,
                "image_directory": directory,
            }
            | surroundings
        )
    )
    directory.mkdir(exist_ok=True)
    async with open_session(spec, around, control) as session:
        yield session, control


async def train(
    spec: ExperimentSpec,
    directory: Path,
    plane: MemoryDataPlane,
    gateway: YesGateway,
    make_fleet: type[ScriptedFleet] = ScriptedFleet,
    **surroundings: Any,
) -> bool:
    """Train to the end beside a scripted fleet."""
    fleet = make_fleet(spec, plane, gateway)
    async with a_session(spec, directory, plane, gateway, **surroundings) as (session, _), asyncio.timeout(240):
        working = asyncio.create_task(fleet.run())
        training = asyncio.create_task(session.run())
        await asyncio.wait({working, training}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            training.cancel()
            working.result()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        return await training
