"""What the proof of the served weights costs: its share of the time in which one version samples.

A real engine samples a version's worth of answers, then loads another image and proves it, as a rollout does it after
each publication. The baseline is the same load without a digest; the share is of the time between two loads.

    python -m benchmarks.serving_proof
"""

import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.weight_pause import save_model
from flotilla.services.rollout.engines.base import GenerationRequest, SamplingParameters
from flotilla.services.rollout.engines.embedded.engine import TorchEngine
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.services.trainer.worker.images import ImagePool
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate

IMAGE_BYTES = 100 << 20
SLOTS = 64
ANSWERS = 128
"""Of a version: a step of 16 groups of 8."""
TOKENS = 256
VERSIONS = 3
MOST_SHARE = 0.01


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        images = ImagePool(save_model(directory, IMAGE_BYTES), served_as=torch.float32)
        path = images.snapshot()
        began = time.perf_counter()
        digest = images.manifest(path, 1).digest
        published = time.perf_counter() - began
        engine = TorchEngine(EngineSettings(str(directory), slots=SLOTS, context_tokens=TOKENS + 32))
        plain, proved, sampled = [], [], []
        for version in range(VERSIONS):
            plain.append(_load(engine, path, 2 * version + 1, None))
            proved.append(_load(engine, path, 2 * version + 2, digest))
            sampled.append(_sample(engine, version))
        images.close()
    costs = statistics.median(proved) - statistics.median(plain)
    share = costs / (statistics.median(sampled) + statistics.median(plain))
    print(f"image {IMAGE_BYTES >> 20} MiB, {ANSWERS} answers of {TOKENS} tokens: {statistics.median(sampled):.2f} s")
    print(f"load {statistics.median(plain):.3f} s, with its proof {statistics.median(proved):.3f} s")
    print(f"checksum and digest in the trainer, beside training: {published:.3f} s")
    print(f"share of generation: {share:.2%} ({'within' if share <= MOST_SHARE else 'ABOVE'} {MOST_SHARE:.0%})")


def _load(engine: TorchEngine, image: Path, version: int, digest: str | None) -> float:
    began = time.perf_counter()
    engine.request_update(version, image, version, OnWeightUpdate.DRAIN, digest)
    while not engine.is_idle:
        for outcome in engine.step():
            assert getattr(outcome, "error", None) is None, outcome
    return time.perf_counter() - began


def _sample(engine: TorchEngine, number: int) -> float:
    began = time.perf_counter()
    sampling = SamplingParameters(TOKENS, ignore_eos=True)
    for group in range(ANSWERS // 8):
        prompt = tuple(range(group, group + 16))
        engine.submit(GenerationRequest(f"{number}-{group}", prompt, tuple(range(8)), sampling))
    while not engine.is_idle:
        engine.step()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
