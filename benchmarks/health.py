"""Runs whose training signal is dead, and healthy ones, on one fleet: is each dead one named, and no other?

Each case is an experiment of the arithmetic example with one thing changed. A dead one has ``NAMED_SECONDS`` from its
first graded group until one of the checks that are right for it is in its ``health``, as the first there; a healthy one
trains its steps, and nothing may be found. Time before the first group (loading torch, starting an engine) is no time
to see anything in, and is left out.

``python -m benchmarks.health [--only NAME,...] [--at-once 2] [--json FILE]``
"""

import argparse
import asyncio
import copy
import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.other_engine import engine_of_another_model
from flotilla.launch_file import read_launch_file, run_prepare
from flotilla.shared.errors import FlotillaError
from flotilla.shared.net.client.client import GatewayClient
from tests.fleet import ROOT, RunningFleet, running_fleet

PRESET = ROOT / "examples" / "arithmetic" / "experiment.yaml"
NAMED_SECONDS = 60.0
START_SECONDS = 300.0
HEALTHY_SECONDS = 420.0
HEALTHY_STEPS = 10
FINAL = ("completed", "failed", "stopped")
ANSWERED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n40+2=42; 42-1=41 #### 41"
DOUBLED = "<|im_start|><|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
GRADERS = """
import time
import zlib


def one(sample):
    return 1.0


def zero(sample):
    return 0.0


def raises(sample):
    raise KeyError("answer")


def slow(sample):
    time.sleep(30)


def huge(sample):
    return 1e37 * (zlib.crc32(sample.response.encode()) % 2)


def by_task(sample):
    return float(zlib.crc32(sample.prompt.encode()) % 2)


def by_response(sample):
    return float(zlib.crc32(sample.response.encode()) % 2)
"""


@dataclass(frozen=True)
class Case:
    """One experiment.

    Attributes:
        name: of the experiment.
        expected: the checks that are right for it; none for a healthy one.
        changes: fields of the spec by dotted path.
    """

    name: str
    expected: tuple[str, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What was seen of a case; ``seconds`` are from its first graded group until it was named, or to its end."""

    name: str
    expected: tuple[str, ...]
    named: tuple[str, ...]
    seconds: float | None
    seen: str
    steps: int
    state: str

    @property
    def is_right(self) -> bool:
        """Whether a dead one was named in time by its cause first, or a healthy one by nothing."""
        if not self.expected:
            return not self.named and self.state == "completed" and self.steps >= HEALTHY_STEPS
        return bool(self.named) and self.named[0] in self.expected and (self.seconds or 1e9) <= NAMED_SECONDS


def dead_cases(files: Path, other_engine: str) -> list[Case]:
    """List what is dead on purpose.

    Args:
        files: where ``prepare_files`` has written.
        other_engine: URL of an engine that samples from another model.
    """

    def custom(function: str, **more: Any) -> list[dict[str, Any]]:
        return [{"kind": "custom", "path": f"{files / 'graders.py'}:{function}", **more}]

    unfiltered: dict[str, Any] = {"reward.filter_zero_spread": False}
    patient: dict[str, Any] = {"reward.max_consecutive_failures": 10**6}
    at_once: dict[str, Any] = {"optimisation.warmup_updates": 0}
    components = "reward.components"
    exact = {"kind": "exact", "pattern": r"####\s*(-?\d+)"}
    lost = ("diverging", "collapsed")
    absent = {"kind": "remote", "url": "http://127.0.0.1:9/", "allow_private": True, "max_attempts": 1}
    by_response = {components: custom("by_response")} | unfiltered
    one_rollout = {"resources": {"rollouts": {"max": 1}}}
    endless = {"rollout.sampling.ignore_eos": True, "rollout.sampling.max_new_tokens": 24}
    return [
        Case("wrong-regex", ("no_answer_found",), {components: [{"kind": "exact", "pattern": r"ANSWER: (\d+)"}]}),
        Case("wrong-number-regex", ("no_answer_found",),
             {components: [{"kind": "numeric", "pattern": r"is (\d+)\."}]} | unfiltered),
        Case("constant-one", ("constant_reward",), {components: custom("one")} | unfiltered),
        Case("constant-zero", ("constant_reward",), {components: custom("zero")}),
        Case("truncated", ("always_truncated",), {"rollout.sampling.max_new_tokens": 2} | unfiltered),
        Case("no-end", ("always_truncated",), endless),
        Case("doubled-special", ("template_mismatch",), {"data.input_template": DOUBLED}),
        Case("other-end", ("template_mismatch",), {"model.path": str(files / "other-end")}),
        Case("wrong-column", ("never_right",), {components: [exact], "data.label_column": "prompt"}),
        Case("wrong-column-number", ("wrong_labels",), {"data.label_column": "prompt"} | patient),
        Case("empty-labels", ("wrong_labels",), {"data.path": str(files / "unlabelled.jsonl")} | patient),
        Case("shifted-labels", ("never_right",), {"data.path": str(files / "shifted.jsonl")}),
        Case("learning-rate-1", lost, {"optimisation.learning_rate": 1.0} | unfiltered | at_once),
        Case("learning-rate-0.1-on-policy", lost,
             {"optimisation.learning_rate": 0.1, "asynchrony": {}} | unfiltered | at_once),
        Case("not-a-number", ("not_finite",),
             {components: custom("huge"), "algorithm.advantage": {"kind": "grpo", "normalise_by_std": False}}),
        Case("grader-raises", ("grader_failing",), {components: custom("raises")} | patient),
        Case("grader-slow", ("grader_failing",), {components: custom("slow", timeout_seconds=0.2)} | patient),
        Case("grader-absent", ("grader_failing",),
             {components: [absent]} | patient),
        Case("entropy", ("entropy_gone",), {"rollout.sampling.temperature": 0.01} | unfiltered),
        Case("all-alike-in-a-group", ("no_signal",), {components: custom("by_task")}),
        Case("answer-in-the-prompt", ("empty_completions",),
             {"data.input_template": ANSWERED, "rollout.sampling.temperature": 0.2} | unfiltered),
        Case("no-bound-on-kl", ("kl_exploding",),
             {"algorithm.kl": {"placement": "loss", "coefficient": 1e-9}, "optimisation.learning_rate": 3e-3,
              "algorithm.policy_loss": {"kind": "policy_gradient"}} | by_response),
        Case("engine-of-another-model", ("engine_mismatch",),
             {"rollout.engine": {"kind": "sglang", "url": other_engine}, "rollout.sampling.max_new_tokens": 12,
              "asynchrony": {}} | by_response | one_rollout),
    ]  # fmt: skip


def healthy_cases() -> list[Case]:
    """List what learns, as far as anybody can tell after a few steps."""
    advantage, unfiltered = "algorithm.advantage", {"reward.filter_zero_spread": False}
    few = {"optimisation.groups_per_mini_batch": 2, "rollout.group_size": 4} | unfiltered
    varied: dict[str, Mapping[str, Any]] = {
        **{f"seed-{seed}": {"seed": seed} for seed in range(5)},
        "unfiltered": unfiltered,
        "small-batches": few,
        "groups-of-two": {"rollout.group_size": 2} | unfiltered,
        "rloo": {advantage: {"kind": "rloo"}},
        "reinforce-plus-plus": {advantage: {"kind": "reinforce_plus_plus"}} | unfiltered,
        "not-normalised": {advantage: {"kind": "grpo", "normalise_by_std": False}},
        "gspo": {"algorithm.policy_loss": {"kind": "gspo"}},
        "kl-loss": {"algorithm.kl": {"placement": "loss", "coefficient": 0.001}},
        "recomputed": {"algorithm.old_log_probs": "recompute"},
        "on-policy": {"asynchrony": {}},
        "stream": {"asynchrony": {"trigger_parameter_sync_step": 2}},
        "stale": {"asynchrony": {"trigger_parameter_sync_step": 2, "staleness_threshold": 1.0}},
        "learning-rate-3e-4": {"optimisation.learning_rate": 3e-4},
        "cool": {"rollout.sampling.temperature": 0.8} | unfiltered,
        "short": {"rollout.sampling.max_new_tokens": 20} | unfiltered,
    }
    return [Case(f"healthy-{name}", (), changes) for name, changes in varied.items()]


def prepare_files(files: Path, base: Mapping[str, Any]) -> None:
    """Write graders, data with labels that are wrong, and a model whose turns end otherwise."""
    (files / "graders.py").write_text(GRADERS)
    rows = [json.loads(line) for line in Path(base["data"]["path"]).read_text().splitlines()[:4000]]
    for name, label in (("unlabelled", lambda _: ""), ("shifted", lambda answer: str(int(answer) + 100_000))):
        text = "".join(json.dumps(row | {"answer": label(row["answer"])}) + "\n" for row in rows)
        (files / f"{name}.jsonl").write_text(text)
    other = files / "other-end"
    shutil.copytree(base["model"]["path"], other)
    for name in ("config.json", "generation_config.json"):
        path = other / name
        if path.exists():
            config = json.loads(path.read_text())
            path.write_text(json.dumps(config | {"eos_token_id": config.get("pad_token_id") or 0}))
    tokenizer = json.loads((other / "tokenizer_config.json").read_text())
    special = [*tokenizer.get("extra_special_tokens", []), tokenizer["eos_token"]]
    changed = {"eos_token": tokenizer["pad_token"], "extra_special_tokens": special}
    (other / "tokenizer_config.json").write_text(json.dumps(tokenizer | changed))


def spec_of(case: Case, base: Mapping[str, Any]) -> dict[str, Any]:
    """Make a case's spec of the preset's."""
    spec: dict[str, Any] = copy.deepcopy(dict(base))
    spec |= {"name": case.name, "evaluation": None, "checkpoint": {"every_steps": 1000}}
    spec["optimisation"] |= {"groups_per_mini_batch": 8, "steps": 10_000 if case.expected else HEALTHY_STEPS}
    for path, value in case.changes.items():
        *parents, last = path.split(".")
        section = spec
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return spec


async def trial(client: GatewayClient, case: Case, base: Mapping[str, Any]) -> Outcome:
    """Run one case until it is named, its time is over, or it ends."""
    try:
        view = await client.call("POST", "/v1/experiments", body=spec_of(case, base), deadline_seconds=60)
    except FlotillaError as error:
        return Outcome(case.name, case.expected, (), None, f"refused: {error}", 0, "refused")
    path, asked, graded_at = f"/v1/experiments/{view['id']}", time.monotonic(), None
    await client.call("POST", f"{path}/start", deadline_seconds=60)
    while True:
        await asyncio.sleep(0.5)
        view, now = await client.call("GET", path, deadline_seconds=60), time.monotonic()
        if graded_at is None and await has_graded(client, path):
            graded_at = now
        limit = NAMED_SECONDS + 15 if case.expected else HEALTHY_SECONDS
        is_late = now - (asked if graded_at is None else graded_at) > (START_SECONDS if graded_at is None else limit)
        named = tuple(each["check"] for each in view["health"])
        is_named = named and (not case.expected or named[0] in case.expected)
        if view["state"] in FINAL or is_named or is_late:
            break
    seconds = None if graded_at is None else round(now - graded_at, 1)
    seen = view["health"][0]["seen"] if view["health"] else str((view["problem"] or {}).get("cause", ""))
    with suppress(FlotillaError):
        if view["state"] not in FINAL:
            await client.call("POST", f"{path}/stop", deadline_seconds=60)
    return Outcome(case.name, case.expected, named, seconds, seen, int(view["step"]), str(view["state"]))


async def has_graded(client: GatewayClient, path: str) -> bool:
    """Whether a group of the experiment has been graded."""
    train = (await client.call("GET", f"{path}/ledger", deadline_seconds=60))["train"]
    ended = sum(sum(train[kind].values()) for kind in ("filtered", "failed"))
    return bool(ended or train["tokens"]["scored"])


async def measure(fleet: RunningFleet, cases: list[Case], base: Mapping[str, Any], at_once: int) -> list[Outcome]:
    """Run the cases on a fleet, some at once."""
    room, outcomes = asyncio.Semaphore(at_once), []

    async def one(client: GatewayClient, case: Case) -> None:
        async with room:
            outcome = await trial(client, case, base)
            outcomes.append(outcome)
            print(line_of(outcome), flush=True)

    async with fleet.client() as client, asyncio.TaskGroup() as tasks:
        for case in cases:
            tasks.create_task(one(client, case))
    return outcomes


def line_of(outcome: Outcome) -> str:
    """Write an outcome as a row of a table."""
    verdict = "right" if outcome.is_right else "WRONG"
    named = ", ".join(outcome.named) or "nothing"
    return f"| {outcome.name} | {named} | {outcome.seconds} | {outcome.steps} | {verdict} | {outcome.seen} |"


def main() -> int:
    """Run the cases and print the table; 1 if one of them is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument("--at-once", type=int, default=2, help="experiments at a time, each with a trainer of its own")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    launch = read_launch_file(PRESET, ["seed=0"])
    asyncio.run(run_prepare(launch, lambda line: print(f"prepare: {line}", flush=True)))
    with tempfile.TemporaryDirectory(prefix="flotilla-health-") as folder:
        files = Path(folder)
        prepare_files(files, launch.document)
        count = arguments.at_once
        with (
            engine_of_another_model(Path(launch.document["model"]["path"])) as other_engine,
            running_fleet(files / "fleet", rollouts=count, trainers=count, rewards=count) as fleet,
        ):
            cases = [*dead_cases(files, other_engine), *healthy_cases()]
            if arguments.only:
                cases = [case for case in cases if case.name in arguments.only.split(",")]
            outcomes = asyncio.run(measure(fleet, cases, launch.document, count))
    if arguments.json:
        found = [asdict(outcome) | {"is_right": outcome.is_right} for outcome in outcomes]
        arguments.json.write_text(json.dumps(found, indent=1))
    wrong = [outcome.name for outcome in outcomes if not outcome.is_right]
    print(f"{len(outcomes) - len(wrong)} of {len(outcomes)} are right; wrong: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
