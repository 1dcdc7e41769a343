"""In which order documented lines are typed, and what has to be there before each.

``examples/arithmetic/experiment.yaml`` is a tiny experiment of that name: its model is random, its steps take a moment.
"""

import re
from collections.abc import Callable
from typing import Final

from tests.e2e.documented.typing import Reader, Typed

Scene = tuple[Typed | Callable[[Reader], object], ...]

CLI, README, CONTINUE, DEBUG, REST = "docs/cli.md", "README.md", "docs/continue.md", "docs/debug.md", "docs/rest.md"
IMPORT, OWN, SWEEPS, SCHEDULING = "docs/import.md", "docs/your-own.md", "docs/sweeps.md", "docs/scheduling.md"
ARITHMETIC = "examples/arithmetic/experiment.yaml"
UP = {"--detach": "--detach --port 0"}


def starts(name: str, steps: int, *more: str) -> Callable[[Reader], None]:
    """Start an experiment of a name, and wait for its end."""

    def do(reader: Reader) -> None:
        settings = " ".join(f"--set {each}" for each in (f"name={name}", f"optimisation.steps={steps}", *more))
        reader.runs(f"flotilla start {ARITHMETIC} {settings}")
        reader.waits(name, state="completed")
        reader.learns(name)

    return do


def knows_the_gateway(reader: Reader) -> None:
    """What pages call ``$api``, ``$auth`` and ``FLOTILLA_TOKEN``."""
    import json

    fleet = json.loads((reader.home / ".flotilla" / "fleet.json").read_text())
    reader.environment |= {
        "api": f"{fleet['gateway_url']}/v1",
        "auth": f"Authorization: Bearer {fleet['token']}",
    }
    reader.known["url"] = fleet["gateway_url"]


def curl(line: str, name: str = "arithmetic", **swap: str) -> Typed:
    """A request of the page of REST; the experiment that it names is that of the scene."""
    given = {"curl ": "curl -sS --fail-with-body "}
    if "arithmetic-3f9a1c" in line:
        given["arithmetic-3f9a1c"] = f"{{{name}}}"
    return Typed(REST, line, given | swap)


def cli(line: str, **more: object) -> Typed:
    """A line of the page of the command line."""
    return Typed(CLI, line, **more)  # type: ignore[arg-type]


def timeline_is_whole(reader: Reader) -> None:
    """Groups lead from their issue through sampling and grading into the step that trained them, in this order."""
    import json

    (file,) = reader.home.rglob("arithmetic-timeline.json")
    events = json.loads(file.read_text())["traceEvents"]
    names = {(each["pid"]): each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert list(names.values()) == ["gateway", "rollout", "reward", "trainer"]
    flows: dict[int, list[tuple[str, str, float]]] = {}
    for each in (each for each in events if each["ph"] in {"s", "t", "f"}):
        flows.setdefault(each["id"], []).append((each["ph"], names[each["pid"]], each["ts"]))
    trained = [flow for flow in flows.values() if flow[-1][1] == "trainer"]
    assert len(trained) >= 10, "of each step some groups"
    for flow in trained:
        way = [("s", "gateway"), ("t", "rollout"), ("t", "reward"), ("f", "trainer")]
        assert [(phase, name) for phase, name, _ in flow] == way
        assert [at for *_, at in flow] == sorted(at for *_, at in flow)


def waits(name: str, **wanted: object) -> Callable[[Reader], None]:
    """Wait for an experiment."""
    return lambda reader: reader.waits(name, **wanted)  # type: ignore[arg-type]


WITHOUT_A_FLEET: Final[Scene] = (
    Typed("docs/install.md", "flotilla --version"),
    cli("flotilla doctor"),
    cli('eval "$(flotilla completion bash)"'),
    cli('flotilla completion zsh > "${fpath[1]}/_flotilla"', swap={"${fpath[1]}/_flotilla": "zsh-completion"}),
    Typed("docs/data.md", f"flotilla spec check {ARITHMETIC} --data"),
    Typed("docs/algorithms.md", f"flotilla spec show {ARITHMETIC} --set algorithm.advantage.kind=rloo"),
    Typed(IMPORT, "flotilla spec check FILE [--data] [--set KEY=VALUE] [--json]",
          {"FILE": ARITHMETIC, "[--data] [--set KEY=VALUE] [--json]": "--set seed=3 --json"}),
    Typed(IMPORT, "flotilla spec show FILE [--set KEY=VALUE] [--json]",
          {"FILE": ARITHMETIC, "[--set KEY=VALUE] [--json]": "--set seed=3 --json"}),
    Typed(IMPORT, "flotilla spec schema"),
    Typed(IMPORT, "flotilla import verl run.sh --rows 17398 --output spec.yaml"),
    Typed(IMPORT, "flotilla import verl ppo.yaml algorithm.adv_estimator=grpo -o spec.yaml",
          {"-o spec.yaml": "-o from-yaml.yaml"}),
    Typed(IMPORT, "flotilla import openrlhf -o spec.yaml -- --pretrain models/m --prompt_data data.jsonl "
          "--apply_chat_template ...",
          {"spec.yaml": "from-flags.yaml", "...": "--remote_rm_url http://127.0.0.1:9/ --max_steps 3"}),
    Typed(IMPORT, "flotilla import openrlhf train.sh -o spec.yaml", {"spec.yaml": "from-script.yaml"}),
    Typed(IMPORT, "flotilla import roll rlvr.yaml -o spec.yaml", {"spec.yaml": "from-roll.yaml"}),
    Typed(IMPORT, "flotilla import coverage DIRECTORY [--json]", {"DIRECTORY [--json]": "lists --json"}),
    *(
        Typed(f"docs/import/{system}.md", f"flotilla import {system} {arguments}")
        for system, arguments in (
            ("verl", "grpo.sh -o grpo-spec.yaml"),
            ("verl", "dapo.sh --rows 3200 -o dapo-spec.yaml"),
            ("verl", "fully_async.sh -o fully-async-spec.yaml"),
            ("openrlhf", "rloo.sh -o rloo-spec.yaml"),
            ("openrlhf", "async.sh -o async-spec.yaml"),
            ("openrlhf", "dpo.sh --rows 6400 -o dpo-spec.yaml"),
            ("roll", "sums.yaml -o sums-spec.yaml"),
            ("roll", "lake.yaml -o lake-spec.yaml"),
            ("roll", "pairs.yaml -o pairs-spec.yaml"),
        )
    ),
)  # fmt: skip

RUNS: Final[Scene] = (
    Typed(CONTINUE, f"flotilla run {ARITHMETIC}", {"run ": "run --plain "}, 130, r"step ([5-9]|\d\d)/"),
    Typed(CONTINUE, f"flotilla run {ARITHMETIC} --continue", {"run ": "run --plain "}),
    Typed(CONTINUE, f"flotilla run {ARITHMETIC} --continue --set optimisation.steps=80", {"=80": "=28"}),
    Typed("docs/jobs.md", f"flotilla evaluate {ARITHMETIC}"),
    Typed("docs/jobs.md", f"flotilla evaluate {ARITHMETIC} --model runs/arithmetic"),
    Typed(
        "docs/jobs.md", f"flotilla evaluate {ARITHMETIC} --set evaluation.greedy=false --set evaluation.group_size=8"
    ),
    Typed("docs/jobs.md", "flotilla show runs/arithmetic-evaluation --kind evaluation"),
    cli("flotilla show runs/arithmetic --problem 211", swap={"211": "11"}),
    cli("flotilla logs trainer --tail 5 --json --data runs/arithmetic/fleet"),
    lambda reader: reader.known.update(sample=sample_of(reader)),
    cli("flotilla replay runs/arithmetic 5 --sample 71.0", swap={"71.0": "{sample}"}),
    Typed("docs/monitoring.md", "flotilla timeline runs/arithmetic"),
    timeline_is_whole,
    Typed("docs/planning.md", "flotilla plan runs/arithmetic --rollouts 4 --staleness 1 --group-size 16"),
    Typed(OWN, "flotilla spec check experiment.yaml --data", {"experiment.yaml": "own/experiment.yaml"}),
    Typed(
        OWN,
        "flotilla run experiment.yaml --fresh --set optimisation.steps=3",
        {"experiment.yaml": "own/experiment.yaml"},
    ),
    Typed(OWN, "flotilla show runs/mine"),
    Typed("docs/images.md", "flotilla show runs/mine --worst -n 20 --html samples.html"),
    Typed(
        DEBUG,
        f"flotilla run {ARITHMETIC} --name wrong-pattern --set "
        "'reward.components=[{kind: exact, pattern: \"ANSWER: (\\\\d+)\"}]' --set health.max_groups_without_signal=400",
        {"=400": "=20 --set reward.filter_zero_spread=true"},
        1,
    ),
    Typed(DEBUG, "flotilla show runs/wrong-pattern -n 1"),
)


def sample_of(reader: Reader) -> str:
    """Find a sample of step 5, as ``show`` writes it."""
    import json

    found = json.loads(reader.runs("flotilla show runs/arithmetic --step 5 --json"))[0]
    return f"{found['group_id']}.{found['member']}"


FLEET: Final[Scene] = (
    Typed(README, "flotilla up --rollouts 2 --detach", {"--rollouts 2": "--rollouts 2 --trainers 2 --rewards 2", **UP}),
    knows_the_gateway,
    Typed(README, f"flotilla start {ARITHMETIC} --seed 1",
          {"--seed 1": "--seed 1 --set optimisation.steps=5000 --set 'tracking.profiler.steps=[3]'"}),
    waits("arithmetic", step=9),
    lambda reader: reader.learns("arithmetic"),
    Typed(README, "flotilla diagnose"),
    Typed(DEBUG, "flotilla status"),
    Typed(DEBUG, "flotilla diagnose"),
    Typed(DEBUG, "flotilla logs --level error"),
    cli("flotilla watch arithmetic --json | jq -c '[.step, .reward]'", swap={"jq -c": "jq --unbuffered -c"}, code=130,
        interrupt=r"\[\d+,"),
    cli("flotilla ls --active"),
    cli("flotilla logs"),
    cli("flotilla logs rollout -f --level warning", swap={"--level warning": "--level info"}, code=130, interrupt="."),
    cli("flotilla show arithmetic"),
    cli("flotilla show arithmetic --step 30 --worst", swap={"30": "3"}),
    cli("flotilla show arithmetic --failed"),
    cli("flotilla show arithmetic --kind evaluation --best -n 1"),
    cli("flotilla checkpoints arithmetic"),
    cli("flotilla replay arithmetic 5", swap={"5": "6"}),
    curl('curl -H "$auth" $api/experiments/arithmetic-3f9a1c/ledger'),
    curl('curl -H "$auth" $api/experiments/arithmetic-3f9a1c/diagnosis'),
    curl('curl -H "$auth" $api/experiments/arithmetic-3f9a1c/usage'),
    curl('curl -H "$auth" $api/experiments/arithmetic-3f9a1c/profiles'),
    curl('curl -H "$auth" -O $api/experiments/arithmetic-3f9a1c/profiles/trainer-step00000040-rank0.json.gz',
         step00000040="step00000003"),
    curl('curl -H "$auth" "$api/experiments/arithmetic-3f9a1c/metrics?names=loss/total,evaluation/accuracy&limit=2"'),
    curl('curl -H "$auth" "$api/experiments/arithmetic-3f9a1c/series?names=loss/*,evaluation/accuracy"'),
    curl('curl -H "$auth" $api/experiments/arithmetic-3f9a1c/checkpoints'),
    curl('curl -H "$auth" $api/experiments/arithmetic-3f9a1c/checkpoints/20/files', **{"/20/": "/4/"}),
    curl('curl -H "$auth" -C - -O $api/experiments/arithmetic-3f9a1c/checkpoints/20/files/model/model.safetensors',
         **{"/20/": "/4/"}),
    curl('curl -H "$auth" $api/experiments/arithmetic-3f9a1c/steps/3'),
    curl('curl -H "$auth" "$api/experiments/arithmetic-3f9a1c/samples?step=30&order=worst&limit=1"', **{"=30": "=3"}),
    curl('curl -H "$auth" $api/experiments/arithmetic-3f9a1c/audit'),
    curl('curl -H "$auth" $api/fleet'),
    curl('curl -H "$auth" $api/tokens -H "Content-Type: application/json" '
         '-d \'{"name": "dashboard", "scope": "reader", "expires_in_seconds": 2592000}\''),
    curl("curl http://127.0.0.1:8470/healthz", **{"http://127.0.0.1:8470": "{url}"}),
    curl("curl http://127.0.0.1:8470/readyz", **{"http://127.0.0.1:8470": "{url}"}),
    curl('curl -H "$auth" http://127.0.0.1:8470/metrics', **{"http://127.0.0.1:8470": "{url}"}),
    curl('curl -H "$auth" -X PATCH $api/experiments/arithmetic-3f9a1c '
         '-d \'{"resources": {"rollouts": {"max": 4}, "weight": 2}}\''),
    Typed(README, "flotilla rollout &", {"rollout &": "rollout > joined 2>&1 & echo $! > joined.pid"}),
    Typed(README, "flotilla pause; flotilla resume; flotilla stop"),
    waits("arithmetic", state="stopped"),
    Typed(README, "flotilla watch"),
    Typed(CONTINUE, "flotilla resume arithmetic"),
    waits("arithmetic", state="running"),
    curl('curl -H "$auth" -X POST $api/experiments/arithmetic-3f9a1c/pause'),
    curl('curl -H "$auth" -X POST $api/experiments/arithmetic-3f9a1c/stop'),
    waits("arithmetic", state="stopped"),
    curl('curl -H "$auth" $api/experiments/arithmetic-3f9a1c/extend -H "Content-Type: application/json" '
         '-d \'{"steps": 120}\'', **{"120": "6000"}),
    Typed(CONTINUE, "flotilla stop arithmetic"),
    waits("arithmetic", state="stopped"),
    lambda reader: reader.runs("kill $(cat joined.pid)"),
    starts("slow", 3),
    starts("fast", 4),
    cli("flotilla report slow"),
    cli("flotilla compare slow fast --metric 'reward/*' --metric loss/total"),
    cli("flotilla ls 'sum-*' --state failed --state stopped --last 10"),
    cli("flotilla delete arithmetic-3f9c1a", swap={"arithmetic-3f9c1a": "{slow}"}),
    curl('curl -H "$auth" -X DELETE $api/experiments/arithmetic-3f9a1c', "fast"),
    starts("mine", 4),
    starts("other", 3),
    Typed(DEBUG, "flotilla show mine --worst -n 3"),
    Typed(DEBUG, "flotilla show mine --best -n 3"),
    Typed(DEBUG, "flotilla show mine --failed"),
    Typed(DEBUG, "flotilla show mine --step 3 --full"),
    Typed(DEBUG, "flotilla report mine"),
    Typed(DEBUG, "flotilla compare mine other"),
    Typed(DEBUG, f"flotilla start {ARITHMETIC} --set name=truncated --set rollout.sampling.max_new_tokens=3"),
    waits("truncated", step=1),
    Typed(DEBUG, "flotilla diagnose truncated"),
    Typed(DEBUG, "flotilla show truncated -n 1"),
    waits("truncated", state="completed"),
    Typed(DEBUG, f"flotilla start {ARITHMETIC} --set name=wrong-label --set data.label_column=chain "
          "--set 'reward.components=[{kind: exact, pattern: \"#### (.*)\"}]'", {"=chain": "=prompt"}),
    waits("wrong-label", step=1),
    Typed(DEBUG, "flotilla diagnose wrong-label"),
    Typed(DEBUG, "flotilla show wrong-label -n 1"),
    waits("wrong-label", state="completed"),
    lambda reader: reader.runs(f"cp {ARITHMETIC} experiment.yaml"),
    cli("flotilla start experiment.yaml --json | jq -r .id"),
    waits("arithmetic", state="completed"),
    Typed(REST, f"flotilla prepare {ARITHMETIC} > spec.json"),
    curl('curl -H "$auth" -H "Content-Type: application/json" --data-binary @spec.json "$api/experiments?start=true"'),
    waits("arithmetic", state="completed"),
    curl('curl -H "$auth" -H "Content-Type: application/yaml" --data-binary @experiment.yaml '
         '"$api/experiments?start=true"'),
    waits("arithmetic", state="completed"),
    lambda reader: reader.learns("arithmetic"),
    curl('curl -N -H "$auth" -H "Last-Event-ID: 41" $api/experiments/arithmetic-3f9a1c/events'),
    curl('curl -H "$auth" $api/experiments/arithmetic-3f9a1c/fork -H "Content-Type: application/json" -d '
         '\'{"step": 40, "changes": {"optimisation": {"steps": 80, "learning_rate": 5e-4}}}\'',
         **{"40": "8", "80": "10"}),
    waits("arithmetic", state="completed"),
    Typed(README, "flotilla down"),
)  # fmt: skip

FORKS: Final[Scene] = (
    Typed(CONTINUE, "flotilla up --detach", UP),
    Typed(CONTINUE, f"flotilla start {ARITHMETIC}"),
    Typed(CONTINUE, "flotilla down"),
    Typed(CONTINUE, "flotilla up --detach", UP),
    Typed(CONTINUE, "flotilla status"),
    waits("arithmetic", state="completed"),
    Typed(CONTINUE, "flotilla extend arithmetic --steps 80", {"80": "16"}),
    waits("arithmetic", step=16, state="completed"),
    lambda reader: reader.learns("arithmetic"),
    Typed(CONTINUE, "flotilla fork arithmetic@40 --set optimisation.learning_rate=2.0e-4 --name slower",
          {"arithmetic@40": "{arithmetic}@12"}),
    waits("slower", state="completed"),
    Typed(CONTINUE, "flotilla compare arithmetic slower"),
    Typed(CONTINUE, "flotilla start --from arithmetic@40 --seed 2", {"arithmetic@40": "{arithmetic}@12"}),
    waits("arithmetic", state="completed"),
    Typed(CONTINUE, f"flotilla start {ARITHMETIC} --from arithmetic", {"--from": "--set optimisation.steps=18 --from"}),
    waits("arithmetic", state="completed"),
    cli("flotilla token create dashboard --scope reader --expires 30d"),
    cli("flotilla token list"),
    cli("flotilla token revoke dashboard"),
    Typed(CONTINUE, "flotilla down"),
)  # fmt: skip

SEVERAL: Final[Scene] = (
    Typed(SCHEDULING, "flotilla up --trainers 2 --rewards 2 --rollouts 3 --detach", UP),
    lambda reader: reader.runs(f"cp {ARITHMETIC} first.yaml; cp {ARITHMETIC} second.yaml"),
    Typed(SCHEDULING, "flotilla start first.yaml"),
    Typed(SCHEDULING, "flotilla start second.yaml"),
    Typed(SCHEDULING, "flotilla status"),
    Typed(SWEEPS, f"flotilla run {ARITHMETIC} --seeds 3 --trainers 3 --rewards 3",
          {"--seeds 3": "--plain --name seeds --seeds 2 --set optimisation.steps=3"}),
    Typed(SWEEPS, "flotilla down"),
    Typed(SWEEPS, "flotilla up --detach --trainers 3 --rewards 3 --rollouts 3", {**UP, "up --": "up --data sweep --"}),
    lambda reader: reader.runs("flotilla down --data sweep"),
)  # fmt: skip


def tutorial(page: str, line: str, **more: object) -> Typed:
    """A line of a tutorial, whose files are in a folder of its name."""
    swap = {name: f"tutorials/{page}/{name}" for name in re.findall(r"[\w-]+\.(?:yaml|py)", line)}
    return Typed(
        f"docs/tutorials/{page}.md", line, swap | {"steps=3": "steps=2"} if "steps=3" in line else swap, **more
    )  # type: ignore[arg-type]


TUTORIALS: Final[Scene] = (
    tutorial("own-model", "flotilla spec check mine.yaml --data"),
    tutorial("own-data", "flotilla spec check data.yaml --data"),
    tutorial("own-reward", "flotilla spec check reward.yaml --data"),
    tutorial("own-reward", "flotilla run reward.yaml --fresh --set optimisation.steps=3"),
    tutorial("own-reward", "flotilla show runs/my-reward --best -n 2"),
    tutorial("environment", "flotilla spec check guess.yaml --data"),
    tutorial("environment", "flotilla run guess.yaml --fresh --set optimisation.steps=3"),
    tutorial("environment", "flotilla show runs/guess --best -n 1"),
    Typed("docs/tutorials/agent.md", "flotilla up --detach", UP),
    knows_the_gateway,
    Typed("docs/tutorials/agent.md", "flotilla start examples/agent/experiment.yaml"),
    lambda reader: reader.learns("agent"),
    Typed("docs/tutorials/agent.md", "python my_agent.py EXPERIMENT",
          {"python my_agent.py EXPERIMENT": "FLOTILLA_GATEWAY_URL={url} FLOTILLA_TOKEN=$(cat .flotilla/token) "
                                            "python tutorials/agent/my_agent.py {agent}"}),
    waits("agent", state="completed"),
    lambda reader: reader.runs("flotilla down"),
)  # fmt: skip

SCENES: Final = {
    "without-a-fleet": WITHOUT_A_FLEET, "runs": RUNS, "fleet": FLEET, "forks": FORKS, "several": SEVERAL
}  # fmt: skip
ALL_SCENES: Final = {**SCENES, "tutorials": TUTORIALS}
"""With the one that has a turn among the long tests (``test_tutorials.py``)."""

ELSEWHERE: Final = {
    ("docs/deploy.md", "sh docker/env.sh"): "tests/contract/test_compose.py",
    ("docs/quick-start.md", "make demo"): "tests/e2e/test_learns.py runs its experiment",
    ("docs/quick-start.md", "flotilla page"): "tests/e2e/test_page_of_folders.py",
    ("docs/quick-start.md", "flotilla"): "as on docs/cli.md and docs/continue.md",
    ("docs/concepts/group.md", "flotilla ledger"): "tests/e2e/test_fleet_commands.py",
    ("docs/concepts/ledger.md", "flotilla ledger"): "tests/e2e/test_fleet_commands.py",
    ("docs/concepts/publication.md", "flotilla status"): "as on docs/debug.md",
    ("docs/concepts/staleness.md", "flotilla"): "as on docs/cli.md and docs/debug.md",
    ("docs/tutorials/own-model.md", "flotilla evaluate mine.yaml"): "as on docs/jobs.md",
    ("docs/tutorials/own-model.md", "flotilla run mine.yaml"): "as on docs/your-own.md",
    ("docs/tutorials/read-the-page.md", "flotilla page --demo"): "tests/e2e/test_page_of_folders.py",
    ("docs/tutorials/coming-from.md", "flotilla import auto train.py"): "tests/unit/importers/test_commands.py",
    ("docs/tutorials/coming-from.md", "flotilla spec check spec.yaml --data"): "as on docs/data.md",
    ("docs/tutorials/scale-out.md", "flotilla run"): "tests/e2e/test_parallel_fleets.py",
    ("docs/tutorials/scale-out.md", "flotilla up --trainers"): "as on docs/scheduling.md",
    ("docs/tutorials/scale-out.md", "flotilla drain"): "tests/faults/test_leaving.py drains rollouts",
    ("docs/tutorials/scale-out.md", "flotilla"): "as on README.md and docs/continue.md",
    ("CONTRIBUTING.md", "make install"): "Makefile: what every checkout begins with",
    ("CONTRIBUTING.md", "make check"): "this suite is a part of it",
    ("CONTRIBUTING.md", "make style"): "`.ci/run` before this suite",
    ("CONTRIBUTING.md", "make coverage"): "a figure to look at: minutes, and a package of its own",
    ("CONTRIBUTING.md", "make docs"): "`.ci/run` beside this suite",
    ("CONTRIBUTING.md", "make release"): "tests/integration/cli/test_installed_wheel.py uses what pip builds",
    ("CONTRIBUTING.md", "make test"): "this suite",
    ("CONTRIBUTING.md", "make test-all"): "this suite, this test included",
    ("README.md", "make test"): "this suite",
    ("README.md", "make demo"): "tests/e2e/test_learns.py runs its experiment",
    ("docs/install.md", "make install"): "Makefile: what every checkout begins with",
    ("docs/install.md", "make demo"): "tests/e2e/test_learns.py runs its experiment",
    ("docs/install.md", "source .venv/bin/activate"): "of every virtual environment",
    ("docs/install.md", "flotilla run examples/arithmetic/experiment.yaml"): "tests/e2e/test_learns.py",
    ("docs/install.md", "pip install '.[torch,reward,data,hub,plot]'"): "tests/integration/cli/test_pip_install.py",
    ("docs/faults.md", "FLOTILLA_FAULTS"): "tests/faults/test_injected.py arms faults in a fleet by this variable",
    ("docs/deadlines.md", "FLOTILLA_START_PATIENCE=3 flotilla up"): "tests/unit/host/test_start_patience.py",
    ("docs/deadlines.md", "FLOTILLA_STALL_SECONDS=60 flotilla up"): "tests/faults/test_diagnosis.py",
    ("docs/page.md", "flotilla page"): "tests/e2e/test_page_of_folders.py",
    ("docs/page.md", "flotilla token create looking --scope reader"): "as on docs/cli.md",
    ("docs/page.md", "flotilla up"): "tests/e2e/test_page.py",
    ("docs/ranks.md", "flotilla run examples/arithmetic/experiment.yaml"): "tests/e2e/test_parallel_fleets.py",
    ("docs/sandbox.md", "flotilla doctor"): "as on docs/install.md",
    (
        "docs/sandbox.md",
        "FLOTILLA_SANDBOX_PROVIDER=docker FLOTILLA_SANDBOX_IMAGE=python:3.12-slim FLOTILLA_SANDBOX_IMAGES='swebench/*' "
        "flotilla up",
    ): "needs a Docker engine; tests/contract/sandbox/test_providers.py does it with one of its own",
    ("docs/survival.md", "python -m tests.survival"): "tests/faults/test_survival.py; the report takes an hour",
    ("docs/soak.md", "python -m tests.soak"): "tests/faults/test_soak.py; the report takes half an hour",
    ("docs/performance.md", "python -m benchmarks.trainer"): "tests/integration/benchmarks/test_smoke.py, in small",
    ("docs/performance.md", "FLOTILLA_TRL_PYTHON="): "tests/integration/benchmarks/test_smoke.py, without TRL",
    ("docs/performance.md", "git worktree add"): "makes a checkout of an earlier commit for the line below it",
    ("docs/security.md", "FLOTILLA_TOKEN=flt_... flotilla stop arithmetic"): "tests of scopes: it is refused",
    ("docs/sweeps.md", "python examples/sweep/sweep.py"): "tests/e2e/test_examples.py",
    ("examples/arithmetic/README.md", "python examples/arithmetic/prepare.py"):
        "tests/integration/examples/test_arithmetic_prepare.py",
    ("examples/continue_a_run/README.md", "flotilla run"): "tests/e2e/test_examples.py, on a fleet that stays",
    ("examples/agent/README.md", "flotilla up --detach"): "as on docs/continue.md",
    ("examples/agent/README.md", "flotilla start examples/agent/experiment.yaml"): "tests/e2e/test_agents.py",
    ("examples/agent/README.md", "python examples/agent/agent.py EXPERIMENT --parallel 32"): "tests/e2e/test_agents.py",
    ("examples/frozen_lake/README.md", "flotilla run examples/frozen_lake/experiment.yaml"):
        "tests/e2e/test_frozen_lake.py",
    ("examples/frozen_lake/README.md", "flotilla show runs/frozen_lake --best"): "tests/e2e/test_frozen_lake.py",
    ("docs/reward.md", "flotilla spec check examples/arithmetic/experiment.yaml --data"): "as on docs/data.md",
    ("docs/reward.md", "flotilla grader check URL"): "tests/unit/cli/test_grader_check.py",
    ("docs/episodes.md", "flotilla"): "tests/e2e/test_frozen_lake.py",
    ("docs/agents.md", "flotilla up --detach"): "as on docs/continue.md",
    ("docs/agents.md", "flotilla start examples/agent/experiment.yaml"): "tests/e2e/test_agents.py",
    ("docs/agents.md", "python examples/agent/agent.py EXPERIMENT --parallel 32"): "tests/e2e/test_agents.py",
    ("docs/samples.md", "flotilla show mine --worst -n 3"): "as on docs/debug.md",
    ("docs/health.md", "flotilla diagnose"): "as on docs/debug.md",
    ("docs/troubleshooting.md", "flotilla"): "as on docs/debug.md",
    ("docs/elasticity.md", "flotilla rollout"): "as on README.md",
    ("docs/elasticity.md", "flotilla rollout --pool spot"): "as on README.md; tests/unit/service/test_notices.py",
    (SCHEDULING, "flotilla rollout --pool lent"): "as on README.md; tests/faults/test_lending.py",
    ("docs/elasticity.md", "flotilla costs arithmetic"): "tests/unit/cli/test_costs.py",
    ("docs/scale.md", "python -m benchmarks.scale"): "a benchmark of minutes",
    **{("docs/security.md", 'docker compose exec redis valkey-cli -u "$(cat secrets/redis-url-operator)" '
        f"--no-auth-warning {what}"): "tests/integration/streams/test_users.py, without containers"
       for what in ("ACL LOG", "CLIENT KILL ADDR 172.18.0.5:40112", "CLIENT LIST", "SCRIPT KILL")},
    ("docs/elasticity.md", "flotilla drain SERVICE_ID"): "tests/faults/test_leaving.py drains rollouts",
    ("docs/engines.md", "flotilla engine install sglang"): "tests/integration/cli/test_engine_install.py",
    ("docs/weights.md", "python -m benchmarks.weights --quick"): "tests/integration/benchmarks/test_smoke.py",
    ("docs/architecture.md", "flotilla status"): "as on docs/debug.md",
    ("docs/life-of-a-task.md", "flotilla status"): "as on docs/debug.md",
    ("docs/glossary.md", "git grep"): "searches the sources",
    ("docs/metrics.md", "flotilla"): "as on docs/cli.md and docs/debug.md",
    ("docs/models.md", "flotilla spec check FILE --data"): "as on docs/data.md",
    ("docs/cli.md", "flotilla export"): "unit tests of the trainer export checkpoints",
    ("docs/lora.md", "flotilla up --rollouts 2 --experiments 8"): "tests/e2e/test_many_experiments.py",
    ("docs/lora.md", "flotilla export"): "unit tests of the trainer export checkpoints",
    ("docs/lora.md", "flotilla evaluate"): "as on docs/jobs.md",
    ("docs/compatibility.md", "flotilla --version"): "as on docs/install.md",
    ("docs/tinker.md", "flotilla up --tinker"): "tests/integration/tinker runs such a fleet",
    ("docs/jobs.md", "flotilla evaluate experiment.yaml --answers"): "tests/unit/gateway/test_finished_written.py",
    ("docs/jobs.md", "flotilla evaluate experiment.yaml --training-rows"): "tests/unit/cli/test_evaluation_spec.py",
    ("docs/jobs.md", "flotilla run experiment.yaml --name again"): "tests/integration/trainer/test_from_dump.py",
    ("docs/jobs.md", "flotilla run experiment.yaml --set rollout.engine"): "tests/unit/engine/test_recorded.py",
    ("docs/sizes.md", "flotilla spec check experiment.yaml"): "tests/unit/cli/test_sizing.py",
    ("docs/sizes.md", "python -m benchmarks.memory"): "benchmarks of minutes to hours",
    ("docs/soak.md", "python -m benchmarks.memory_soak"): "benchmarks of minutes to hours",
    ("docs/jobs.md", "flotilla run examples/finished_answers/"):
        "tests/integration/trainer/test_finished_answers.py trains each kind of job",
    ("examples/finished_answers/README.md", "flotilla run examples/finished_answers/"):
        "tests/integration/trainer/test_finished_answers.py trains each kind of job",
    ("examples/http_grader/README.md", "python examples/http_grader/grader.py &"): "tests/e2e/test_examples.py",
    ("examples/http_grader/README.md", "flotilla run"): "tests/e2e/test_examples.py, on a fleet that stays",
    ("examples/frozen_lake/README.md", "flotilla"): "tests/e2e/test_frozen_lake.py, by night",
    ("examples/tool_use/README.md", "flotilla"): "tests/e2e/test_tool_use.py, by night",
    ("examples/short_answers/README.md", "flotilla run"): "tests/e2e/test_examples.py, on a fleet that stays",
    ("docs/rest.md", 'curl -H "$auth" $api/experiments/arithmetic-3f9a1c/checkpoints/20/upload'):
        "tests/e2e/test_fleet_commands.py, by flotilla checkpoints --verify",
    ("examples/short_answers/README.md", "flotilla show runs/short-answers --best"): "as on docs/cli.md",
    ("docs/cluster.md", "FLOTILLA_DATABASE_URL_FILE="): "tests/integration/gateway/test_standbys.py",
    ("docs/import.md", "flotilla import auto train.py"): "tests/unit/importers/test_commands.py",
    ("docs/import.md", "flotilla import trl train.py"): "tests/unit/importers/test_commands.py",
    ("docs/import.md", "flotilla import roll rlvr.yaml --set rollout.group_size=2 --try"):
        "tests/integration/importers/test_trials.py",
    ("docs/import.md", "flotilla import verl run.sh --rows 17398 --try"): "tests/integration/importers/test_trials.py",
    ("docs/import/trl.md", "flotilla import trl"): "tests/unit/importers/test_documented_examples.py",
    ("docs/planning.md", "flotilla plan experiment.yaml --probe"): "tests/e2e/test_planning.py",
    ("docs/rest.md", 'curl -H "$auth" "$api/experiments/arithmetic-3f9a1c/logs?level=warning"'):
        "tests/unit/gateway/test_service_logs.py",
    ("docs/steering.md", "flotilla set arithmetic"): "tests/unit/gateway/test_live_changes.py",
    ("docs/steering.md", "flotilla diagnose arithmetic"): "as on docs/debug.md",
    ("docs/trust.md", "flotilla receipt"): "tests/unit/cli/test_receipts.py",
    ("docs/trust.md", "flotilla regrade"): "tests/unit/cli/test_regrading.py",
}  # fmt: skip
"""Lines, by page and beginning, that other tests run."""

NOT_HERE: Final = {
    (
        "docs/tutorials/scale-out.md",
        "python -P -m flotilla.services.rollout",
    ): "on another machine; tests/faults/test_hosts.py has two hosts on one",
    ("examples/verifiers/README.md", "python -m venv .venv-verifiers"): "tests/e2e/test_verifiers.py",
    ("examples/verifiers/README.md", ".venv-verifiers/bin/"): "tests/e2e/test_verifiers.py",
    ("examples/verifiers/README.md", "python examples/arithmetic/prepare.py"): "tests/e2e/test_verifiers.py",
    ("examples/verifiers/README.md", "flotilla "): "tests/e2e/test_verifiers.py",
    ("examples/harbor/README.md", ""): "tests/e2e/test_environments.py",
    ("examples/nemo_gym/README.md", ""): "tests/e2e/test_environments.py",
    ("docs/agents.md", "python -m flotilla.agents"): "tests/e2e/test_environments.py",
    ("examples/agent/README.md", "pip install openai"): "pyproject.toml: the tests' own packages have it",
    ("README.md", "git clone ADDRESS"): "Docker is not on the machines of the tests",
    (
        "docs/deploy.md",
        "kubectl",
    ): "no cluster is on the machines of the tests; what is applied, tests/contract/deploy checks",
    ("README.md", "docker compose"): "Docker is not on the machines of the tests",
    ("docs/containers.md", ""): "Docker is not on the machines of the tests; tests/contract/test_compose.py reads it",
    (
        "docs/ranks.md",
        "FLOTILLA_GATEWAY_URL=",
    ): "it asks for a second host; tests/faults/test_hosts.py starts such a trainer",
    ("docs/install.md", "python3.11 -m venv"): "tests/integration/cli/test_pip_install.py makes one in its own place",
    ("docs/install.md", "pip install torch"): "torch is two hundred megabytes",
    ("docs/gpu-status.md", "pip download"): "for a machine that has a GPU and no network",
    ("docs/continue.md", "pip install 'flotilla[data]' s3fs"): "no store of objects is on the machines of the tests",
    (
        "docs/lora.md",
        "pip install 'flotilla[bitsandbytes]'",
    ): "tests/integration/trainer/test_quantised.py uses what it installs",
    ("docs/continue.md", "FLOTILLA_CHECKPOINT_URLS="): "likewise; tests/unit/gateway/test_uploads.py has files",
    ("docs/continue.md", "flotilla start mine.yaml --set checkpoint."): "tests/unit/gateway/test_continuing.py",
    ("docs/cluster.md", "FLOTILLA_DATA="): "on other machines; tests/faults/test_hosts.py has two hosts on one",
    ("docs/cluster.md", "python -P -m flotilla.services."): "likewise; tests/integration/cli/test_service_main.py",
    ("docs/cluster.md", "flotilla"): "as on docs/cli.md, with another machine's gateway",
    ("docs/rest.md", 'curl -H "$auth" -X PUT "$api/services/'): "only the service that registered may say this",
    ("docs/rest.md", 'curl -H "$auth" -X POST $api/services/'): "tests/faults/test_leaving.py drains rollouts",
    ("docs/rest.md", 'curl -H "$auth" $api/experiments/arithmetic-3f9a1c/metrics -d'): "only its trainer may",
    ("docs/rest.md", 'curl -H "$auth" -X PUT $api/experiments/E/publications'): "only a trainer's transfer can",
    ("docs/rest.md", 'curl -H "$auth" "$api/experiments/E/publications'): "only a trainer's transfer can",
    ("docs/rest.md", 'curl -H "$auth" $api/experiments/E/publications'): "only a trainer's transfer can",
}
"""Lines, by page and beginning, that cannot be run in a test, and why."""
