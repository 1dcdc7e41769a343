"""What recording samples costs a step, and how long it takes to find one among 10,000 steps.

Recording: a small model (about 8 million parameters) trains steps of 16 groups of 8 answers; each step's samples are
kept as the trainer keeps them. The cost is CPU time, which a busy machine does not change: that of the writer's thread
and of what the training thread hands over, divided by the CPU time of the step itself. At most 2 % is wanted.

Finding: 10,000 files of 128 samples are made; then the index is built, pages are read as the gateway reads them, and
``flotilla show DIRECTORY`` is run as a command. At most 0.5 s is wanted of a page, and 0.5 s of CPU time of the
command: its wall time is printed as well.

``python -m benchmarks.samples [--steps 10000] [--trained 12] [--tokens 200] [--hidden 256] [--rounds 5] [--megabytes
16] [--directory DIR] [--json FILE]``. Exit code 1 if a bound is not kept. About 5 minutes on two cores.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from transformers import Qwen3Config, Qwen3ForCausalLM

from flotilla.services.trainer.data.plan import StepGroups
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.services.trainer.worker.samples import StepSamples
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.sections.samples import SamplesConfig
from flotilla.shared.samples.folder import SAMPLES, SampleFolder, step_name, stored_files
from flotilla.shared.samples.index import SampleIndex
from flotilla.shared.samples.query import SampleOrder, SampleQuery
from flotilla.shared.samples.reading import read_page
from flotilla.shared.samples.recorder import SampleRecorder
from flotilla.shared.samples.table import to_table
from flotilla.shared.schemas.sample_kinds import KeptGroup, SampleFile, SampleKind
from flotilla.shared.schemas.trajectory import GradeStatus, Group, Trajectory
from flotilla.shared.streams.plans import Plan
from flotilla.shared.testing.builders import a_task, a_trajectory

GROUPS, MEMBERS = 16, 8
MOST_SHARE, MOST_SECONDS = 0.02, 0.5
VOCABULARY = 1000


def a_step(generator: np.random.Generator, step: int, tokens: int) -> tuple[Group, ...]:
    """Make the groups of a step, with rewards of 0 and 1 and texts as long as their tokens."""
    groups = []
    for number in range(GROUPS):
        members = []
        for _ in range(MEMBERS):
            made: Trajectory = a_trajectory(
                prompt_tokens=50, sampled_tokens=tokens, seed=int(generator.integers(2**31)), text="word " * tokens
            )
            reward = float(generator.random() < 0.5)
            members.append(made.graded(GradeStatus.SCORED, reward, components={"exact": reward}, reason="compared"))
        task = a_task(step * GROUPS + number, row=int(generator.integers(7000)), group_size=MEMBERS)
        groups.append(Group(task, tuple(members), "question " * 30))
    return tuple(groups)


def a_learner(hidden: int) -> Learner:
    """Make a model of 8 layers (about 8 million parameters where they are 256 wide) and what trains it."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    spec = validate_spec(
        {
            "name": "samples",
            "model": {"path": "/unused"},
            "data": {"path": "unused.jsonl"},
            "rollout": {"group_size": MEMBERS},
            "reward": {"components": [{"kind": "exact"}]},
            "optimisation": {"steps": 1000, "groups_per_mini_batch": GROUPS, "learning_rate": 1e-6},
        }
    )
    return Learner(spec, LoadedModel(Qwen3ForCausalLM(config).eval(), Path()))


def measure_recording(directory: Path, num_steps: int, tokens: int, hidden: int) -> dict[str, Any]:
    """Train steps and keep them; CPU seconds of the writer's thread against those of all threads."""
    torch.set_num_threads(1)
    learner, generator = a_learner(hidden), np.random.default_rng(0)
    recorder = SampleRecorder(directory, SamplesConfig(), writer="trainer").start()
    samples, handed, steps, walls = StepSamples(recorder), [], [], []
    written: list[float] = []
    write = recorder._folder.write

    def timed(file: SampleFile) -> int:
        size = write(file)
        written.append(time.thread_time())
        return size

    recorder._folder.write = timed  # type: ignore[method-assign]
    for step in range(1, num_steps + 1):
        groups = a_step(generator, step, tokens)
        plan = Plan(step, step - 1, tuple(each.task.group_id for each in groups), (), 0, 0, 0, ())
        started, wall = time.thread_time(), time.monotonic()
        result = learner.train(groups, step)
        trained = time.thread_time()
        samples.trained(StepGroups(plan, groups, False, 0.0, 0.0), result, step - 1, "root", lambda _: 0)
        handed.append(time.thread_time() - trained)
        steps.append(trained - started)
        walls.append(time.monotonic() - wall)
        assert recorder.flush(60)
    recorder.close()
    # The first step imports pyarrow.
    writing = (written[-1] - written[0]) / (len(written) - 1)
    cost = writing + statistics.mean(handed[1:])
    sampled = num_steps * GROUPS * MEMBERS * tokens
    return {
        "step_cpu_seconds": statistics.mean(steps[1:]),
        "step_wall_seconds": statistics.mean(walls[1:]),
        "recording_cpu_seconds": cost,
        "on_the_training_thread_seconds": statistics.mean(handed[1:]),
        "share": cost / statistics.mean(steps[1:]),
        "bytes_per_sampled_token": recorder.written_bytes / sampled,
        "lost_files": recorder.lost_files,
        "threads": threading.active_count(),
    }


def make_files(directory: Path, num_steps: int) -> int:
    """Write files of many steps, each with numbers and rewards of its own; returns their bytes."""
    folder, generator = directory / SAMPLES, np.random.default_rng(1)
    folder.mkdir(parents=True)
    groups = [KeptGroup(group, SampleKind.TRAINED) for group in a_step(generator, 1, 20)]
    table = to_table(SampleFile(step_name(1), groups, 1, 0, {}))
    count = table.num_rows
    for step in range(1, num_steps + 1):
        rows = np.repeat(generator.integers(0, 7000, GROUPS), MEMBERS)
        changed = {
            "step": pa.array(np.full(count, step)),
            "version": pa.array(np.full(count, step - 1)),
            "group_id": pa.array(np.repeat(np.arange(GROUPS) + step * GROUPS, MEMBERS)),
            "row": pa.array(rows),
            "reward": pa.array(generator.normal(size=count)),
        }
        for name, column in changed.items():
            table = table.set_column(table.schema.get_field_index(name), name, column)
        path = folder / step_name(step)
        parquet.write_table(table, path, compression="zstd")
        os.utime(path, (1_700_000_000 + step, 1_700_000_000 + step))
    return sum(file.size_bytes for file in stored_files(folder))


def measure_finding(directory: Path, num_steps: int, rounds: int) -> dict[str, Any]:
    """Build the index, read pages, run the command."""
    size = make_files(directory, num_steps)
    fresh = SampleIndex(directory)
    started = time.monotonic()
    first = read_page(fresh, SampleQuery(), limit=20, after=None, with_tokens=False, seconds=0.3)
    first_seconds = time.monotonic() - started
    started = time.monotonic()
    fresh.refresh(seconds=3600)
    index_seconds = time.monotonic() - started
    queries = {
        "newest": SampleQuery(),
        "step": SampleQuery(step=num_steps // 2),
        "worst": SampleQuery(order=SampleOrder.WORST),
        "best of a step": SampleQuery(step=num_steps // 3, order=SampleOrder.BEST),
        "problem": SampleQuery(row=17),
        "rewards within bounds": SampleQuery(min_reward=0.5, max_reward=0.5001),
    }
    pages = {name: _median([_page_seconds(fresh, query) for _ in range(rounds)]) for name, query in queries.items()}
    fresh.close()
    commands = {}
    for words in ((), ("--step", str(num_steps // 2), "--worst"), ("--worst",), ("--problem", "17")):
        commands["flotilla show DIRECTORY " + " ".join(words)] = _command([str(directory), *words], rounds)
    return {
        "files": num_steps,
        "samples": num_steps * GROUPS * MEMBERS,
        "bytes": size,
        "index_bytes": (directory / SAMPLES / ".index.sqlite").stat().st_size,
        "index_seconds": index_seconds,
        "first_page_without_index_seconds": first_seconds,
        "first_page_unread": first.num_unread,
        "page_seconds": pages,
        "commands": commands,
    }


def _page_seconds(index: SampleIndex, query: SampleQuery) -> float:
    started = time.monotonic()
    read_page(index, query, limit=20, after=None, with_tokens=False, seconds=0.3)
    return time.monotonic() - started


def _command(words: Sequence[str], rounds: int) -> dict[str, float]:
    """Run ``flotilla show`` some times: medians of wall and CPU seconds."""
    walls, processors = [], []
    for _ in range(rounds):
        before, started = _children(), time.monotonic()
        subprocess.run([sys.executable, "-m", "flotilla", "show", *words], check=True, stdout=subprocess.DEVNULL)
        walls.append(time.monotonic() - started)
        processors.append(_children() - before)
    return {"wall_seconds": _median(walls), "cpu_seconds": _median(processors)}


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 4)


def measure_bound(directory: Path, megabytes: int) -> dict[str, Any]:
    """Write more than the bound allows, and see what stays."""
    most, generator = megabytes * 1024**2, np.random.default_rng(2)
    folder, written, largest, step = SampleFolder(directory, SamplesConfig(max_bytes=most)), 0, 0, 0
    while written < 2 * most:
        step += 1
        groups = [KeptGroup(group, SampleKind.TRAINED) for group in a_step(generator, step, 200)]
        written += folder.write(SampleFile(step_name(step), groups, step, step - 1, {}))
        largest = max(largest, sum(file.size_bytes for file in stored_files(folder.path)))
    return {"max_bytes": most, "written_bytes": written, "largest_bytes": largest}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and say whether the bounds are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000, help="files to find samples in (%(default)s)")
    parser.add_argument("--trained", type=int, default=12, help="steps to train and keep (%(default)s)")
    parser.add_argument("--tokens", type=int, default=200, help="sampled tokens of an answer (%(default)s)")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model that is trained (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of each page and command (%(default)s)")
    parser.add_argument("--megabytes", type=int, default=16, help="bound that is kept to (%(default)s)")
    parser.add_argument("--directory", type=Path, help="where files are made (default: a temporary directory)")
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args(argv)
    if arguments.directory:
        arguments.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        places = {part: Path(name) / part for part in ("recording", "bound", "finding")}
        for place in places.values():
            place.mkdir()
        found = {
            "recording": measure_recording(places["recording"], arguments.trained, arguments.tokens, arguments.hidden),
            "bound": measure_bound(places["bound"], arguments.megabytes),
            "finding": measure_finding(places["finding"], arguments.steps, arguments.rounds),
        }
        # Before ten thousand files are removed, which takes its time on a busy disk.
        print(json.dumps(found, indent=2), flush=True)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    pages = found["finding"]["page_seconds"].values()
    commands = [each["cpu_seconds"] for each in found["finding"]["commands"].values()]
    is_kept = (
        found["recording"]["share"] <= MOST_SHARE
        and found["bound"]["largest_bytes"] <= found["bound"]["max_bytes"]
        and max(*pages, *commands) <= MOST_SECONDS
    )
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
