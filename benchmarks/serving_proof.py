"""What the proof of the served weights costs: its share of the time in which one version samples.

A real engine samples a version's worth of answers, then loads another image and proves it, as a rollout does it after
each publication. The baseline is the same load without a digest; the share is of the time between two loads. With
``--rank`` the versions are adapters alone, of which the embedded engine serves the sums. A server of SGLang or vLLM
needs an interpreter that has it (``flotilla engine install``).

    python -m benchmarks.serving_proof [--rank 16] [--engine vllm --python .venv-vllm/bin/python]
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import torch

from benchmarks.weight_pause import save_model
from flotilla.services.rollout.engines.base import Engine, GenerationRequest, ProvesWeights, SamplingParameters
from flotilla.services.rollout.engines.process.engine import ProcessEngine
from flotilla.services.rollout.engines.servers.settings import ServerSettings
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.services.rollout.engines.sglang.engine import SglangEngine
from flotilla.services.rollout.engines.vllm.engine import VllmEngine
from flotilla.services.trainer.worker.images import ImagePool
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.config.sections.model import ModelConfig

IMAGE_BYTES = 100 << 20
SLOTS = 64
GROUP = 8
ANSWERS = 128
"""Of a version: a step of 16 groups."""
TOKENS = 256
VERSIONS = 3
MOST_SHARE = 0.01


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving_proof", description=__doc__)
    parser.add_argument("--engine", choices=["torch", "sglang", "vllm"], default="torch")
    parser.add_argument("--python", type=Path, help="interpreter of a server")
    parser.add_argument("--rank", type=int, help="publish adapters of this rank alone")
    parser.add_argument("--answers", type=int, default=ANSWERS, help="of a version, eight a group (%(default)s)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of an answer (%(default)s)")
    torch.set_num_threads(1)
    asyncio.run(measure(parser.parse_args()))


async def measure(arguments: argparse.Namespace) -> None:
    """Measure and print."""
    kind, rank, answers, tokens = arguments.engine, arguments.rank, arguments.answers, arguments.tokens
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        weights = await asyncio.to_thread(save_model, directory, IMAGE_BYTES, rank)
        base = ModelConfig(path=str(directory))
        images = ImagePool(weights, served_as=torch.float32, base=base)
        stack.callback(images.close)
        path = images.snapshot()
        images.manifest(path, 1)  # the base is digested once
        began = time.perf_counter()
        digest = images.manifest(path, 1).digest
        published = time.perf_counter() - began
        assert digest is not None
        engine = engine_of(kind, directory, arguments.python, tokens + 32)
        await engine.start()
        stack.push_async_callback(engine.close)
        # A server finds out by the weights that it begins with what it can tell, once.
        await _load(engine, path, 1, digest)
        plain, proved, sampled = [], [], []
        for version in range(VERSIONS):
            plain.append(await _load(engine, path, 2 * version + 2, None))
            proved.append(await _load(engine, path, 2 * version + 3, digest))
            sampled.append(await _sample(engine, version, answers // GROUP, tokens))
    costs = statistics.median(proved) - statistics.median(plain)
    share = costs / (statistics.median(sampled) + statistics.median(plain))
    what = f"{IMAGE_BYTES >> 20} MiB" if rank is None else f"{IMAGE_BYTES >> 20} MiB with adapters of rank {rank}"
    print(f"{kind}, {what}, {answers} answers of {tokens} tokens: {statistics.median(sampled):.2f} s")
    print(f"load {statistics.median(plain):.3f} s, with its proof {statistics.median(proved):.3f} s")
    print(f"checksum and digest in the trainer, beside training: {published:.3f} s")
    print(f"share of generation: {share:.2%} ({'within' if share <= MOST_SHARE else 'ABOVE'} {MOST_SHARE:.0%})")


def engine_of(kind: str, model: Path, python: Path | None, tokens: int) -> Engine:
    """Make an engine, not yet started.

    Raises:
        SystemExit: no interpreter was named for a server.
    """
    if kind == "torch":
        return ProcessEngine(EngineSettings(str(model), slots=SLOTS, context_tokens=tokens))
    if python is None:
        raise SystemExit(f"--engine {kind} needs --python")
    settings = ServerSettings(model, python=python.absolute(), slots=SLOTS, context_tokens=tokens)
    return SglangEngine(settings) if kind == "sglang" else VllmEngine(settings)


async def _load(engine: Engine, image: Path, version: int, digest: str | None) -> float:
    began = time.perf_counter()
    if digest is None:
        await engine.load_weights(image, version, OnWeightUpdate.DRAIN)
    else:
        assert isinstance(engine, ProvesWeights)
        assert await engine.load_proved(image, version, OnWeightUpdate.DRAIN, digest), "it cannot be proved"
    return time.perf_counter() - began


async def _sample(engine: Engine, number: int, groups: int, tokens: int) -> float:
    began = time.perf_counter()
    sampling = SamplingParameters(tokens, ignore_eos=True)
    prompts = [tuple(range(group, group + 16)) for group in range(groups)]
    async with asyncio.TaskGroup() as tasks:
        for group, prompt in enumerate(prompts):
            request = GenerationRequest(f"{number}-{group}", prompt, tuple(range(GROUP)), sampling)
            tasks.create_task(engine.generate(request))
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
