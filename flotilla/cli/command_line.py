"""Every command and its arguments; a command's own module is imported when it is run."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flotilla.cli import parsing
from flotilla.cli.log_lines import LEVELS
from flotilla.cli.parsing import Parser, add_command, add_experiment, add_gateway, add_json
from flotilla.cli.upkeep import add_upkeep
from flotilla.defaults import DEFAULT_DATA, DEFAULT_PORT

if TYPE_CHECKING:
    from flotilla.cli.parsing import Commands

STATES = ("draft", "starting", "running", "paused", "stopping", "stopped", "completed", "failed")
SCOPES = ("operator", "service", "agent", "grader", "reader", "tinker")
KINDS = ("rollout", "reward", "sandbox", "trainer")
DATA_HELP = (
    "also open the model's directory, tokenizer, graders and data as the start of an experiment does: prints rows, "
    "columns, and the first prompt as the model sees it. Downloads remote data, and runs the code of a custom "
    "dataset or grader"
)


def build_parser() -> Parser:
    """Describe the command line."""
    parser = Parser(prog="flotilla", description="An asynchronous RL post-training fleet.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(commands)
    _add_evaluate(commands)
    _add_fleet(commands)
    _add_membership(commands)
    _add_experiments(commands)
    _add_kept(commands)
    _add_page(commands)
    _add_samples(commands)
    _add_tokens(commands)
    _add_files(commands)
    _add_grader(commands)
    _add_engine(commands)
    add_upkeep(commands)
    text = (
        "Check whether a fleet can run on this machine, or whether a running one is healthy, and how to fix problems."
    )
    doctor = add_command(commands, "doctor", text, "doctor:doctor")
    text = "have services of every host of the fleet try to reach each other, Redis and the shared folder"
    doctor.add_argument("--fleet", action="store_true", help=text)
    add_gateway(doctor)
    add_json(doctor)
    text = "Make certificates for the hosts of a fleet with openssl, by an authority of its own in FOLDER."
    certs = add_command(commands, "certs", text, "certs:certs")
    certs.add_argument("folder", metavar="FOLDER", help="folder for the authority's key and all certificates")
    text = "host name or address at which its services are reached; several of one host: 10.0.0.2,worker-2"
    certs.add_argument("hosts", metavar="HOST", nargs="+", help=text)
    certs.add_argument("--days", type=parsing.at_least_one, default=825, help="their validity (%(default)s)")

    completion = add_command(commands, "completion", "Print the completion script of a shell.", "completion:completion")
    completion.add_argument("shell", choices=["bash", "zsh"])
    return parser


class _Version(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        # Here, since no other command needs it.
        from importlib.metadata import version

        print(f"flotilla {version('flotilla')}")
        parser.exit()


def _add_run(commands: "Commands") -> None:
    text = "Run one experiment on a fleet of its own, show its result, and stop the fleet."
    parser = add_command(commands, "run", text, "run:run")
    parsing.add_spec(parser)
    parsing.add_fleet(parser, default_port=0, follows_file=True)
    parser.add_argument("--runs", default="runs", help="folder of run directories (%(default)s)")
    parser.add_argument("--name", help="name of the experiment and its run directory (default: the file's name)")
    text = "run it with N consecutive seeds, from its own on, on one fleet, and compare them (default: its own only)"
    parser.add_argument("--seeds", type=parsing.seeds, metavar="N", help=text)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--continue", dest="go_on", action="store_true", help="continue the run of this name where it ended"
    )
    which.add_argument("--fresh", action="store_true", help="move an earlier run of this name to RUNS/earlier")
    parser.add_argument("--plain", action="store_true", help="lines instead of a live view")


def _add_evaluate(commands: "Commands") -> None:
    text = "Evaluate a model on the held-out problems of an experiment file, without training."
    parser = add_command(commands, "evaluate", text, "evaluate:evaluate")
    parsing.add_spec(parser)
    text = "the model: a model's directory, a checkpoint, or a run, whose newest checkpoint is used"
    parser.add_argument("--model", metavar="DIRECTORY", help=f"{text} (default: model.path of the file)")
    parser.add_argument("--rows", metavar="FILE", help="problems to answer (default: those of the evaluation section)")
    text = "answer the training rows once, rollout.group_size answers each, sampled as in training: for data.dump"
    parser.add_argument("--training-rows", action="store_true", help=text)
    text = "column of the rows with existing answers, which are graded instead of a model's"
    parser.add_argument("--answers", metavar="COLUMN", help=text)
    parsing.add_fleet(parser, default_port=0, follows_file=True)
    parser.add_argument("--runs", default="runs", help="folder of run directories (%(default)s)")
    parser.add_argument(
        "--name", help="name of the experiment and its run directory (default: the file's name; NAME-evaluation)"
    )
    parser.add_argument("--plain", action="store_true", help="lines instead of a live view")
    parser.set_defaults(go_on=False)


def _add_fleet(commands: "Commands") -> None:
    up = add_command(commands, "up", "Start a fleet on this machine.", "fleet:up")
    parsing.add_fleet(up, default_port=DEFAULT_PORT, follows_file=False)
    text = "address of this machine on which the gateway and the services listen (%(default)s)"
    up.add_argument("--host", default="127.0.0.1", help=text)
    up.add_argument("--data", default=DEFAULT_DATA, help="data directory (%(default)s)")
    each = "GPUs of each %s service, 0 for none (default: an even share of all)"
    up.add_argument("--trainer-devices", type=parsing.at_least_zero, metavar="N", help=each % "trainer")
    up.add_argument("--rollout-devices", type=parsing.at_least_zero, metavar="N", help=each % "rollout")
    shared = "trainers divide all GPUs among them, and so do rollouts: for resources.sharing time"
    up.add_argument("--share-devices", action="store_true", help=shared)
    up.add_argument("--no-sandbox", action="store_true", help="start no sandbox service")
    parsing.add_experiments(up, "each trainer, rollout and reward process", default=1)
    tinker = "serve the Tinker API at /api/v1 (with --model); services for experiments only if asked for by number"
    up.add_argument("--tinker", action="store_true", help=tinker)
    up.add_argument("--model", metavar="PATH", help="directory of the Tinker API's base model (no default)")
    models = "models of the Tinker API in memory; others wait on disk (default: 32; full-weight models need one each)"
    up.add_argument("--tinker-models", type=parsing.at_least_one, metavar="N", help=models)
    disk = "disk quota for the models of one Tinker API key, in 10^9 bytes (default: half of the disk)"
    up.add_argument("--tinker-disk-gb", type=parsing.at_least_one, metavar="N", help=disk)
    add_json(up)
    up.add_argument("--detach", "-d", action="store_true", help="leave it running and return")
    down = add_command(commands, "down", "End the fleet on this machine.", "fleet:down")
    down.add_argument("--data", default=DEFAULT_DATA, help="data directory (%(default)s)")
    status = add_command(commands, "status", "List services and experiments.", "status:status")
    add_gateway(status)
    add_json(status)


def _add_membership(commands: "Commands") -> None:
    text = "Start one more rollout service for a running fleet; on SIGTERM it leaves in order."
    rollout = add_command(commands, "rollout", text, "membership:rollout")
    add_gateway(rollout)
    rollout.add_argument("--notice", type=parsing.seconds, help="grace period for leaving, in seconds (default: 25)")
    text = "pool of its machine, such as spot or spot-a100 (default: FLOTILLA_POOL, else on demand)"
    rollout.add_argument("--pool", help=text)
    parsing.add_experiments(rollout, "it", default=None)
    text = "Make a rollout finish or hand over its work, and leave the fleet."
    drain = add_command(commands, "drain", text, "membership:drain")
    drain.add_argument("service", help="full id of the service, see `flotilla status`")
    drain.add_argument("--notice", type=parsing.seconds, help="grace period in seconds (default: 30)")
    add_gateway(drain)


def _add_experiments(commands: "Commands") -> None:
    text = "Create and start an experiment on a running fleet."
    start = add_command(commands, "start", text, "start:start")
    parsing.add_spec(start, is_needed=False)
    text = "start from a checkpoint: EXPERIMENT or EXPERIMENT@STEP, or a path; without SPEC with its own settings"
    start.add_argument("--from", dest="origin", metavar="WHERE", help=text)
    add_json(start)
    add_gateway(start)
    text = "Prepare what an experiment file needs (models, data), and print the spec to send over REST."
    parsing.add_spec(add_command(commands, "prepare", text, "start:prepare"))
    for name, text in (
        ("stop", "Stop an experiment; its checkpoints stay."),
        ("pause", "Pause an experiment."),
        ("resume", "Continue a paused experiment, or a stopped or failed one from its newest checkpoint."),
    ):
        parser = add_command(commands, name, text, f"experiment:{name}")
        add_experiment(parser)
        add_json(parser)
        add_gateway(parser)
    text = "Give an experiment more steps; one that has ended continues from its newest checkpoint."
    extend = add_command(commands, "extend", text, "continuing:extend")
    add_experiment(extend)
    extend.add_argument("--steps", type=parsing.at_least_one, required=True, help="the new optimisation.steps")
    add_json(extend)
    add_gateway(extend)
    text = "Change settings of an experiment while it runs: learning rate, temperature, group size; docs/steering.md."
    change = add_command(commands, "set", text, "continuing:change")
    change.add_argument("experiment", help="id, its beginning, or name")
    change.add_argument("settings", nargs="+", metavar="KEY=VALUE", help="such as optimisation.learning_rate=5e-7")
    add_json(change)
    add_gateway(change)
    text = "Start an experiment from a checkpoint of another, with changed settings if given."
    fork = add_command(commands, "fork", text, "continuing:fork")
    fork.add_argument("origin", metavar="EXPERIMENT[@STEP]", help="id, its beginning, or name (default step: newest)")
    parsing.add_overrides(fork)
    fork.add_argument("--name", help="name of the new experiment (default: that of the other)")
    add_json(fork)
    add_gateway(fork)
    watch = add_command(commands, "watch", "Follow an experiment.", "experiment:watch")
    add_experiment(watch)
    watch.add_argument("--plain", action="store_true", help="lines instead of a live view")
    add_json(watch, "print a line of JSON whenever something has changed")
    add_gateway(watch)
    for name, text in (
        ("diagnose", "Show what bounds an experiment's speed, and what would change it."),
        ("ledger", "Show where every issued group is."),
    ):
        parser = add_command(commands, name, text, f"experiment:{name}")
        add_experiment(parser)
        add_json(parser)
        add_gateway(parser)


def _add_samples(commands: "Commands") -> None:
    text = "Show samples: newest step first, or the worst, the best, the failed ones."
    show = add_command(commands, "show", text, "show:show")
    text = "id, its beginning, or name; or a directory, such as runs/NAME (default: the active one, else the newest)"
    show.add_argument("experiment", nargs="?", help=text)
    replay = add_command(
        commands,
        "replay",
        "Recompute a trained step from its samples and a checkpoint, and compare it with the record.",
        "replay:replay",
    )
    replay.add_argument("experiment", help=text.partition(" (default")[0])
    replay.add_argument("step", type=parsing.at_least_one, help="number of the step")
    replay.add_argument("--sample", metavar="GROUP.ANSWER", help="show this sample token by token")
    show.add_argument(
        "--step",
        type=parsing.at_least_zero,
        metavar="N",
        help="samples of this step, or evaluated after it (default: any)",
    )
    order = show.add_mutually_exclusive_group()
    order.add_argument("--worst", action="store_true", help="lowest reward first, of all steps or of --step")
    order.add_argument("--best", action="store_true", help="highest reward first")
    show.add_argument("--failed", action="store_true", help="samples of groups that failed, or whose grading failed")
    kinds = ("trained", "filtered", "dropped", "failed", "evaluation")
    show.add_argument("--kind", choices=kinds, help="outcome of the group (default: trained)")
    show.add_argument("--problem", type=parsing.at_least_zero, metavar="ROW", help="samples of this row of the dataset")
    show.add_argument("--group", type=parsing.at_least_zero, metavar="ID", help="all answers of this group")
    show.add_argument("--limit", "-n", type=parsing.at_least_one, default=4, help="most samples (%(default)s)")
    show.add_argument("--full", action="store_true", help="do not shorten long texts")
    show.add_argument("--html", metavar="FILE", help="write them as an HTML page with the images of their prompts")
    show.add_argument("--tokens", action="store_true", help="with --json: token ids, log-probabilities, advantages")
    what = "Grade a run's samples again by another reward section, and list changed rewards and advantages."
    regrade = add_command(commands, "regrade", what, "regrade:regrade")
    regrade.add_argument("experiment", help=text.partition(" (default")[0])
    what = "YAML or JSON file with the new section, or a spec with one"
    regrade.add_argument("--reward", metavar="FILE", required=True, help=what)
    what = (
        "JSON lines to write, one group each; completes the file of an interrupted call (default: beside the samples)"
    )
    regrade.add_argument("--output", "-o", metavar="FILE", help=what)
    what = "environment variable that graders of FILE may read (secret_env, api_key_env); repeatable"
    regrade.add_argument("--secret", metavar="NAME", action="append", default=[], help=what)
    what = "Write a signed record of what a checkpoint was trained on, or check one."
    receipt = add_command(commands, "receipt", what, "receipt:receipt")
    receipt.add_argument(
        "checkpoint", nargs="?", help="folder of a checkpoint, or of a run, whose newest checkpoint is used"
    )
    receipt.add_argument("--verify", metavar="FILE", help="check this receipt; exits with 1 if something has changed")
    receipt.add_argument(
        "--output", "-o", metavar="FILE", help="file to write (default: in receipts/ of the experiment)"
    )
    what = "private key (PEM) to sign with (default: your own, made once); with --verify the public key"
    receipt.add_argument("--key", metavar="FILE", help=what)
    add_json(receipt)
    for parser in (show, replay, regrade):
        add_json(parser)
        add_gateway(parser)


def _add_page(commands: "Commands") -> None:
    text = "Show recorded runs on the gateway's page, read-only and without a fleet."
    parser = add_command(commands, "page", text, "page:page")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="folder of a run, or data directory of a fleet")
    parser.add_argument("--demo", action="store_true", help="show a recorded run that the package contains")
    parser.add_argument("--port", type=parsing.at_least_zero, default=0, help="port of the page, 0 for any free one")
    parser.add_argument("--no-browser", action="store_true", help="print the address and open nothing")
    text = "Write a run's timeline for Chrome and Perfetto: a row per service, a flow per group."
    timeline = add_command(commands, "timeline", text, "timeline:timeline")
    text = "folder of a run, of a fleet's data, or of an experiment; a running one is read as it is now"
    timeline.add_argument("run", metavar="RUN", help=text)
    timeline.add_argument("--output", "-o", metavar="FILE", help="file to write (default: NAME-timeline.json)")
    text = "the newest N steps and all other events since they began, 0 for the whole run (%(default)s)"
    timeline.add_argument("--steps", type=parsing.at_least_zero, default=200, metavar="N", help=text)
    add_json(timeline)
    _add_plan(commands)


def _add_plan(commands: "Commands") -> None:
    text = "Predict a run's speed under other settings from its records."
    plan = add_command(commands, "plan", text, "plan:plan")
    text = "id, its beginning, or name; or a directory, such as runs/NAME; with --probe an experiment file"
    plan.add_argument("experiment", nargs="?", help=text)
    text = "run N steps of the experiment file first (%(const)s), and predict from these"
    plan.add_argument("--probe", type=parsing.at_least_two, nargs="?", const=2, metavar="N", help=text)
    whole, factor = parsing.at_least_one, parsing.above_zero
    plan.add_argument("--rollouts", type=whole, metavar="N", help="rollout services")
    plan.add_argument("--staleness", type=parsing.amount, metavar="X", help="asynchrony.staleness_threshold")
    plan.add_argument("--group-size", type=whole, metavar="N", help="rollout.group_size")
    plan.add_argument("--groups", type=whole, metavar="N", help="optimisation.groups_per_mini_batch")
    text = "asynchrony.trigger_parameter_sync_step"
    plan.add_argument("--steps-per-version", type=whole, metavar="N", help=text)
    plan.add_argument("--slots", type=whole, metavar="N", help="rollout.engine.slots")
    plan.add_argument("--lengths", type=factor, default=1.0, metavar="FACTOR", help="multiply the lengths of answers")
    plan.add_argument("--max-new-tokens", type=whole, metavar="N", help="limit on the tokens of an answer")
    text = "multiply the time of grading"
    plan.add_argument("--grading", type=factor, default=1.0, metavar="FACTOR", help=text)
    plan.add_argument(
        "--cores", type=whole, metavar="N", help="cores that rollouts and trainer share (default: as recorded)"
    )
    text = "cores that they shared in the recorded run (default: those of this machine)"
    plan.add_argument("--had-cores", type=whole, metavar="N", help=text)
    add_json(plan)
    add_gateway(plan)


def _add_kept(commands: "Commands") -> None:
    ls = add_command(commands, "ls", "List experiments: the active ones first, then newest first.", "listing:ls")
    ls.add_argument("name", nargs="*", help="names or ids, such as 'sum-*' (default: all)")
    ls.add_argument("--active", action="store_true", help="only active ones")
    ls.add_argument(
        "--state", action="append", choices=STATES, help="only those in this state (default: any; may be repeated)"
    )
    ls.add_argument("--last", type=parsing.at_least_one, metavar="N", help="at most N (default: all)")
    text = "Delete an experiment's record; its directory stays without --files."
    delete = add_command(commands, "delete", text, "listing:delete")
    add_experiment(delete, is_needed=True)
    text = "also its directory, with checkpoints and samples, unless another experiment needs them"
    delete.add_argument("--files", action="store_true", help=text)
    text = "List an experiment's checkpoints: their places, the newest, the best."
    checkpoints = add_command(commands, "checkpoints", text, "listing:checkpoints")
    add_experiment(checkpoints, or_directory=True)
    checkpoints.add_argument("--all", action="store_true", help="also list removed ones")
    checkpoints.add_argument(
        "--verify", action="store_true", help="compare with the copies at checkpoint.upload_to now"
    )
    for parser in (ls, delete, checkpoints):
        add_json(parser)
        add_gateway(parser)
    text = "Merge the adapters of a checkpoint (model.lora) into one whole model."
    export = add_command(commands, "export", text, "export:export")
    export.add_argument("source", help="directory of a checkpoint, an experiment, a run, or an adapter")
    export.add_argument("directory", help="new directory for the model")
    export.add_argument("--average", action="store_true", help="export the moving average (optimisation.average_decay)")
    add_json(export)
    text = "Show an experiment's results, with --plot also as a picture."
    report = add_command(commands, "report", text, "report:report")
    add_experiment(report, or_directory=True)
    picture = "picture to write: .png, .pdf or .svg (default: none)"
    report.add_argument("--plot", metavar="FILE", help=picture)
    text = "Compare experiments: metrics at equal steps, differences of their specs, with --plot a picture."
    compare = add_command(commands, "compare", text, "report:compare")
    add_experiment(compare, is_needed=True, or_directory=True)
    compare.add_argument("others", nargs="+", metavar="EXPERIMENT", help="experiments to compare it with")
    compare.add_argument("--metric", action="append", metavar="NAME", help="such as 'loss/*' (default: the usual ones)")
    compare.add_argument(
        "--step", type=parsing.at_least_zero, help="compare up to this step (default: the last of all)"
    )
    compare.add_argument("--plot", metavar="FILE", help=picture)
    for parser in (report, compare):
        add_json(parser)
        add_gateway(parser)
    logs = add_command(commands, "logs", "Show what the processes of a local fleet write.", "logs:logs")
    logs.add_argument("service", nargs="?", help="process, such as rollout-0, or kind, such as rollout (default: all)")
    logs.add_argument("--follow", "-f", action="store_true", help="follow new lines until Ctrl-C")
    logs.add_argument("--tail", "-n", type=parsing.at_least_zero, default=50, help="last lines of each (%(default)s)")
    logs.add_argument("--level", choices=LEVELS, default="debug", help="lowest level shown (%(default)s: all)")
    logs.add_argument(
        "--data", default=DEFAULT_DATA, help="data directory; that of a run is runs/NAME/fleet (%(default)s)"
    )
    add_json(logs, "print each line as a JSON object")


def _add_tokens(commands: "Commands") -> None:
    text = "Create, list and revoke access tokens of a fleet."
    token = commands.add_parser("token", help=text, description=text)
    actions: Commands = token.add_subparsers(required=True, metavar="ACTION")
    create = add_command(actions, "create", "Make a token, and print it once.", "token:create")
    create.add_argument("name", help="name of the token, for audit records and revocation")
    create.add_argument("--scope", choices=SCOPES, default="reader", help="what it allows (%(default)s)")
    create.add_argument("--kind", choices=KINDS, help="of service, with --scope service (default: any)")
    create.add_argument("--experiment", metavar="ID", help="restrict it to this experiment")
    text = "its owner: it sees, creates and changes only experiments of this owner (default: those of all)"
    create.add_argument("--owner", metavar="NAME", help=text)
    create.add_argument(
        "--expires", type=parsing.life, default="90d", help="lifetime: 30m, 12h, 90d, or never (default: 90d)"
    )
    listing = add_command(actions, "list", "List the tokens that were made.", "token:list_tokens")
    revoke = add_command(actions, "revoke", "Revoke a token: its next request is refused.", "token:revoke")
    revoke.add_argument("token", help="its name or id")
    for parser in (create, listing, revoke):
        add_json(parser)
        add_gateway(parser)


def _add_files(commands: "Commands") -> None:
    text = "Check or show an experiment file, or print the schema."
    spec = commands.add_parser("spec", help=text, description=text)
    actions: Commands = spec.add_subparsers(required=True, metavar="ACTION")
    for name, what in (
        ("check", "Check whether the file is valid."),
        ("show", "Print every value and its origin."),
    ):
        parser = add_command(actions, name, what, f"spec:{name}")
        parser.add_argument("spec", help="experiment file, YAML or JSON")
        parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="override, as optimisation.steps=10")
        add_json(parser)
        if name == "check":
            parser.add_argument("--data", action="store_true", help=DATA_HELP)
    add_command(actions, "schema", "Print the JSON Schema of a spec.", "spec:schema")
    text = "Translate a launch file of another system into a spec, and report what becomes of each parameter."
    imports = commands.add_parser("import", help=text, description=text)
    _add_imports(imports.add_subparsers(required=True, metavar="SYSTEM"))


def _add_grader(commands: "Commands") -> None:
    text = "Check whether a grader behind a URL meets the protocol of reward services."
    grader = commands.add_parser("grader", help=text, description=text)
    actions: Commands = grader.add_subparsers(required=True, metavar="ACTION")
    text = "Send requests as in training, and invalid ones; report every deviation."
    check = add_command(actions, "check", text, "grader:check")
    check.add_argument("url", help="URL of the grader, as in the component's url")
    check.add_argument("--dialect", choices=["flotilla", "openrlhf"], default="flotilla", help="(%(default)s)")
    check.add_argument("--secret-env", metavar="NAME", help="environment variable with the signing secret")
    check.add_argument("--timeout", type=parsing.seconds, default=60.0, help="seconds for one answer (%(default)s)")
    add_json(check)


def _add_engine(commands: "Commands") -> None:
    text = "Install SGLang or vLLM in the supported version."
    engine = commands.add_parser("engine", help=text, description=text)
    actions: Commands = engine.add_subparsers(required=True, metavar="ACTION")
    text = "Create an environment with an engine, and print the variable that points a fleet to it."
    install = add_command(actions, "install", text, "engine:install")
    install.add_argument("engine", choices=["sglang", "vllm"], help="the engine")
    install.add_argument("--path", metavar="DIRECTORY", help="directory of the environment (default: .venv-ENGINE)")
    install.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="device to compute on (%(default)s)")


def _add_imports(systems: "Commands") -> None:
    what = "YAML file, or launch script (.sh)"
    for name in ("verl", "roll"):
        parser = add_command(systems, name, f"{name}: {what}", "import_file:import_file")
        parser.add_argument("file", help=what)
        parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="parameters given on the command line")
        _import_options(parser, name)
    text = "openrlhf: a launch script (.sh) and its variables (NAME=VALUE), or -- and the flags"
    openrlhf = add_command(systems, "openrlhf", text, "import_file:import_file")
    _import_options(openrlhf, "openrlhf")
    openrlhf.add_argument("words", nargs="+", metavar="FLAGS", help="launch script and NAME=VALUE, or -- and the flags")
    text = "trl: a Python script that creates a trainer (read, never run); or the YAML of trl grpo --config"
    trl = add_command(systems, "trl", text, "import_file:import_file")
    trl.add_argument("file", help="script (.py, .sh) or YAML")
    trl.add_argument("overrides", nargs="*", metavar="NAME=VALUE", help="variables that the script reads; parameters")
    _import_options(trl, "trl")
    text = "auto: a launch file of any of them, which is recognised"
    auto = add_command(systems, "auto", text, "import_file:import_file")
    auto.add_argument("file", help="script, YAML or Python script")
    auto.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="parameters, or variables of a script")
    _import_options(auto, "auto")
    text = "Report what becomes of every parameter in lists of parameters (JSON)."
    parser = add_command(systems, "coverage", text, "import_file:show_coverage")
    parser.add_argument("directory", help="directory of the lists")
    add_json(parser)


def _import_options(parser: argparse.ArgumentParser, system: str) -> None:
    parser.add_argument("--output", "--out", "-o", help="file for the spec (default: standard output)")
    parser.add_argument("--force", action="store_true", help="replace existing files")
    if system != "openrlhf":  # whose scripts name no files
        parser.add_argument("--config-dir", metavar="DIR", help="folder of files that it names, if not beside it")
    text = "number of training rows, to convert epochs into steps"
    parser.add_argument("--rows", type=parsing.at_least_one, help=text)
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="set a field of the resulting spec")
    text = "which of several programs that a script starts to read, counted from 1"
    parser.add_argument("--program", type=parsing.at_least_one, metavar="N", help=text)
    text = "rollout engine; auto: the named server if its FLOTILLA_..._PYTHON is set, else embedded"
    parser.add_argument("--engine", choices=["auto", "embedded", "sglang", "vllm"], default="auto", help=text)
    parser.add_argument("--allow-refused", action="store_true", help="write the spec without refused parameters")
    parser.add_argument("--strict", action="store_true", help="fail on unsupported parameters, too")
    add_json(parser, "report as JSON")
    text = "then scale the spec down and train two steps on this machine, with a small random model and synthetic rows"
    parser.add_argument("--try", dest="tries", action="store_true", help=text)
    parser.add_argument("--keep", metavar="DIR", help="keep the files of --try in this folder")
    parser.set_defaults(system=system)


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """List a parser's commands by name."""
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def leaves(parser: argparse.ArgumentParser, words: Sequence[str] = ()) -> dict[str, argparse.ArgumentParser]:
    """List every command that can be run, as it is typed, such as ``spec check``."""
    inner = subcommands(parser)
    if not inner:
        return {" ".join(words): parser}
    return {text: leaf for name, each in inner.items() for text, leaf in leaves(each, (*words, name)).items()}
