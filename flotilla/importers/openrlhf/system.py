"""OpenRLHF as a system to import from: what its flags mean together."""

import math
from typing import Any

from flotilla.importers.adapter import adapter_name, openrlhf_adapter
from flotilla.importers.datasets import file_or_hub, held_out, takes_split, training
from flotilla.importers.openrlhf import flags, learning
from flotilla.importers.source import Source, System, make_system
from flotilla.importers.spelling import attention_of, dtype_of, is_private_host, low_rank, not_seen
from flotilla.importers.values import same
from flotilla.shared.config.sections.data import PLACE
from flotilla.shared.config.sections.parallelism import MOST_RANKS

Fields = dict[str, Any]

SCHEDULES = {
    "cosine_with_min_lr": ("cosine", 0.1), "cosine": ("cosine", 0.0), "linear": ("linear", 0.0),
    "constant": ("constant", None), "constant_with_warmup": ("constant", None),
}  # fmt: skip
WITHOUT_ANSWER = (
    "rollout.sampling.max_new_tokens: --data.max_len bounds prompt and answer together, and here each has a bound of "
    "its own: give --rollout.max_new_tokens, what an answer may have"
)
UNLIMITED = 1e8
"""OpenRLHF's own --max_samples."""
ATTEMPT_SECONDS, ATTEMPTS = 180.0, 5
"""What OpenRLHF gives a remote reward: five tries of three minutes, a second apart."""


def _mini_batches(source: Source) -> int:
    samples = source.required("--rollout_batch_size") * source.required("--n_samples_per_prompt")
    return max(int(samples) // int(source.required("--train_batch_size")), 1)


def _steps(source: Source) -> int | None:
    total = source.value("--max_steps")
    if total is not None:
        return int(total)
    if source.rows is None:
        return None
    rows = min(source.rows, source.required("--max_samples"))
    return int(rows * source.required("--num_episodes") // source.required("--rollout_batch_size"))


def batches(source: Source) -> Fields:
    """Make the sizes of mini-batch and step."""
    train, number = source.required("--train_batch_size"), _mini_batches(source)
    size = source.required("--n_samples_per_prompt")
    if train % size:
        source.refuse("--train_batch_size", f"{train} samples are no whole number of groups of {size}: make it one")
    groups = max(train // size, 1)
    if groups * number != source.required("--rollout_batch_size"):
        source.refuse("--rollout_batch_size", "must hold a whole number of train batches: make it one")
    return {"optimisation.groups_per_mini_batch": groups, "asynchrony.require_batches": number}


def asynchrony(source: Source) -> Fields:
    """Make the asynchrony."""
    if not source.value("--async_train"):
        return {"asynchrony.staleness_threshold": 0.0}
    queue = source.required("--async_queue_size")
    return {
        "asynchrony.staleness_threshold": float(queue),
        "asynchrony.max_lag": queue,
        "asynchrony.on_weight_update": "continue" if source.value("--partial_rollout") else "drain",
    }


def trainer_devices(source: Source) -> Fields:
    """Make the trainer's devices; with images a model whose images are computed here."""
    why = not_seen(str(source.value("--pretrain") or "")) if source.value(flags.MOST_IMAGES) else None
    if why is not None:
        source.lack(why)
    return devices(source)


def devices(source: Source) -> Fields:
    """Make the trainer's devices and what its ranks divide, where the number of GPUs is written."""
    name, on = "--actor_num_gpus_per_node", "--actor_num_nodes"
    is_one = on not in source.given or same(source.given[on].value, 1)
    if name not in source.given or (is_one and same(source.given[name].value, 1)):
        return {}
    nodes = 1 if is_one else int(source.required(on))
    ranks = int(source.required(name)) * nodes
    if ranks > MOST_RANKS:
        for each in source.given.keys() & {name, on}:
            source.put_aside(source.given[each].spelling, f"a job has {MOST_RANKS} training processes at most")
        return {}
    fields: Fields = {"resources.trainer.devices": ranks // nodes}
    if nodes > 1:
        fields["parallelism.nodes"] = nodes
    return fields | _divided(source, ranks)


def _divided(source: Source, ranks: int) -> Fields:
    """Make what the ranks divide of each layer or sequence: one of both."""
    fields: Fields = {}
    names = {"tensor_parallel": "--ds_tensor_parallel_size", "sequence_parallel": "--ring_attn_size"}
    for field, flag in names.items():
        size = int(source.required(flag)) if flag in source.given and not fields else 1
        if size == 1:
            continue
        if ranks % size:
            source.put_aside(source.given[flag].spelling, f"it does not divide the {ranks} GPUs")
        elif field == "tensor_parallel" and source.value("--lora_rank"):
            source.put_aside(source.given[flag].spelling, "adapters are on layers that it divides")
        else:
            fields[f"parallelism.{field}"] = size
    return fields


def kernels(source: Source) -> Fields:
    """Make attention by name and Liger's kernels."""
    placed, name = trainer_devices(source), "--attn_implementation"
    on_gpus = "resources.trainer.devices" in placed
    fields: Fields = {}
    if name in source.given:
        found = attention_of(
            source.given[name].value,
            on_gpus=on_gpus,
            dtype=str(lengths(source)["model.dtype"]),
            divides_sequences="parallelism.sequence_parallel" in placed,
        )
        if found is not None:
            source.value(name)
            fields["model.attention"] = found
    if on_gpus and source.value("--use_liger_kernel"):
        fields["model.kernels"] = "liger"
    return fields


def sharing(source: Source) -> Fields:
    """Make turns on the same devices, where engines sleep that are placed with the trainer."""
    both = ("--colocate_all_models", "--vllm_enable_sleep")
    # Agents ask engines at any time; one flag without the other is read by nobody.
    if source.value("--agent_func_path") is not None or not all(name in source.given for name in both):
        return {}
    return {"resources.sharing": "time"} if all(source.value(name) for name in both) else {}


def publication(source: Source) -> Fields:
    """Make the weights' way, where it is written."""
    if not source.has("--vllm_sync_backend"):
        return {}
    transport = source.choose("--vllm_sync_backend", {"nccl": "auto", "gloo": "gloo"})
    return {} if transport is None else {"asynchrony.publication.transport": transport}


def schedule(source: Source) -> Fields:
    """Make steps, warm-up, decay and the period of checkpoints."""
    fields = decay(source)
    total = _steps(source)
    if not total:
        source.lack(
            "optimisation.steps: --num_episodes counts passes over the data: give --rows N, the number of its rows "
            "(at least one rollout_batch_size), or --max_steps"
        )
        return fields
    return fields | over_steps(source, total, total * _mini_batches(source) * source.required("--max_epochs"))


def decay(source: Source) -> Fields:
    """Make how the learning rate falls, and to which part of its peak."""
    found = source.choose("--lr_scheduler", SCHEDULES) or ("constant", None)
    floor = {} if found[1] is None else {"optimisation.min_learning_rate_ratio": found[1]}
    return {"optimisation.schedule": found[0], **floor}


def over_steps(source: Source, steps: int, updates: int) -> Fields:
    """Make steps, warm-up, the period of checkpoints, and what these hold where that is not everything.

    Args:
        source: with the flags.
        steps: of the experiment, at least 1.
        updates: of the weights in all of them.
    """
    every = source.required("--save_steps")
    held: Fields = {"checkpoint.contents": ["model"]} if source.value("--disable_ds_ckpt") else {}
    return held | {
        "optimisation.steps": steps,
        "optimisation.warmup_updates": math.ceil(source.required("--lr_warmup_ratio") * updates),
        "checkpoint.every_steps": steps if every <= 0 else min(every, steps),
    }


def lengths(source: Source) -> Fields:
    """Make the engine's context, the longest answer and the token budget."""
    answer, whole = source.required("--generate_max_len"), source.value("--data.max_len")
    if whole is not None and not source.has("--generate_max_len"):
        if source.value("--agent_func_path") is not None:
            answer = whole - 1  # an agent's turn may take what the context leaves
        else:
            source.lack(WITHOUT_ANSWER)
    context = source.required("--prompt_max_len") + answer if whole is None else whole
    if source.value("--use_dynamic_batch"):
        budget = source.required("--train_max_tokens_per_gpu")
    else:
        budget = source.required("--micro_train_batch_size") * context
    dtype = dtype_of(source, "--param_dtype")
    return {
        "data.max_prompt_tokens": None if whole is not None else context - answer,
        "rollout.sampling.max_new_tokens": answer,
        "rollout.engine.context_tokens": context,
        "optimisation.micro_batch_tokens": budget,
        "model.dtype": dtype,
    }


def model(source: Source) -> Fields:
    """Make the model."""
    fields: Fields = {}
    path = source.value("--pretrain")
    if path is None:
        source.lack("model.path: give --pretrain")
    else:
        fields["model.path"] = path
    return fields | low_rank(source, flags.LOW_RANK)


def average(source: Source) -> Fields:
    """Make the moving average, where one is kept."""
    return {"optimisation.average_decay": source.required("--ema_beta")} if source.value("--enable_ema") else {}


def critic(source: Source) -> Fields:
    """Refuse adapters beside a critic, which has some there and trains whole here."""
    if source.value("--lora_rank") and source.value("--advantage_estimator") == "gae":
        source.refuse("--lora_rank", "it gives the critic adapters, too, which trains whole here: use an estimator "
                      "without a critic, or set model.lora in the spec")  # fmt: skip
    return {}


def data(source: Source) -> Fields:
    """Make the training rows, their template, and what becomes of long prompts."""
    fields: Fields = {"data.overlong": {"kind": "truncate", "side": "left"}}
    if not source.value("--apply_chat_template"):
        template = source.value("--input_template")
        fields["data.input_template"] = template if template is not None and PLACE in template else PLACE
    places = _places(source, "--prompt_data", "--prompt_split")
    if not places:
        source.lack("data.path: give --prompt_data")
        return fields
    weights = source.value("--prompt_data_probs")
    if weights is not None and len(weights) != len(places):
        source.refuse("--prompt_data_probs", f"{len(weights)} weights for {len(places)} datasets: give one for each")
        weights = None
    most = source.required("--max_samples")
    limit = {} if most >= UNLIMITED else {"max_rows": most}
    if weights is None or len(places) == 1:
        return fields | training(places) | {f"data.{name}": value for name, value in limit.items()}
    weighted = zip(places, weights, strict=True)
    return fields | training([{**place, **limit, "weight": weight} for place, weight in weighted])


def _places(source: Source, name: str, split_name: str) -> list[Fields]:
    places = [file_or_hub(written) for written in source.value(name) or []]
    splitting = [place for place in places if takes_split(place)]
    if splitting and (split := source.value(split_name)) not in {None, "train"}:
        for place in splitting:
            place["split"] = split
    return places


def evaluation(source: Source) -> Fields:
    """Make the evaluation, where there is a dataset for it."""
    places = _places(source, "--eval_dataset", "--eval_split")
    if not places:
        return {}
    every, temperature = source.required("--eval_steps"), source.required("--eval_temperature")
    return held_out(places) | {
        "evaluation.every_versions": every if every > 0 else None,
        "evaluation.greedy": not temperature,
        **(_sampled(source, temperature) if temperature else {}),
    }


def _sampled(source: Source, temperature: float) -> Fields:
    """Make how many answers are sampled; greedy ones would all be the same."""
    answers = source.required("--eval_n_samples_per_prompt")
    return {"evaluation.temperature": temperature, "evaluation.group_size": answers}


def tracking(source: Source) -> Fields:
    """Make the trackers, where they are asked for."""
    trackers: list[dict[str, Any]] = []
    if source.value("--use_wandb"):
        options = {"project": "--wandb_project", "entity": "--wandb_org", "group": "--wandb_group"}
        trackers.append({"kind": "wandb", **{field: source.value(name) for field, name in options.items()}})
    folder = source.value("--use_tensorboard")
    if folder is not None:
        trackers.append({"kind": "tensorboard", "directory": folder})
    return {"tracking.trackers": trackers} if trackers else {}


def rewards(source: Source) -> Fields:
    """Make the grader, the penalties, the clip and the filter."""
    fields: Fields = {**_grader(source), **_shaping(source)}
    if source.value("--dynamic_filtering"):
        span = source.value("--dynamic_filtering_reward_range") or []
        if len(span) != 2:
            source.refuse("--dynamic_filtering_reward_range", "two numbers, low and high")
            return fields
        fields["reward.group_filter"] = {"kind": "mean_in_range", "low": span[0], "high": span[1], **_scores(source)}
    return fields


def _scores(source: Source) -> Fields:
    """Name what the filter judges: the scores beside the rewards, which are the rewards where there are none."""
    url = source.value("--remote_rm_url")
    if source.value("--agent_func_path") is not None:
        return {"metric": "agent/score"}
    return {} if url is None else {"metric": f"{'custom' if _is_file(url) else 'remote'}/score"}


def _is_file(url: str) -> bool:
    """Whether OpenRLHF calls a function of a file: the first entry says so for all."""
    return url.split(",")[0].strip().endswith(".py")


def _grader(source: Source) -> Fields:
    url = source.value("--remote_rm_url")
    if source.value("--agent_func_path") is not None:
        return _agents(source)
    if url is None:
        return _reward_models(source)
    urls = [each.strip() for each in url.split(",")]
    if _is_file(url):
        if len(urls) > 1:
            source.refuse("--remote_rm_url", "a file is called alone: leave out what comes after it")
            return {}
        file = adapter_name(url, "reward_func")
        source.files[file] = openrlhf_adapter(url)
        return {"reward.components": [{"kind": "custom", "path": f"{file}:score", "timeout_seconds": ATTEMPT_SECONDS}]}
    if not all(urls):
        source.refuse("--remote_rm_url", "an entry between the commas is empty: leave it out")
        return {}
    # OpenRLHF divides samples evenly among its URLs: a URL that is named twice gets twice as many.
    replicas = [{"url": each, "weight": float(urls.count(each))} for each in dict.fromkeys(urls)]
    component = {
        "kind": "remote",
        **({"urls": replicas} if len(replicas) > 1 else {"url": urls[0]}),
        "dialect": "openrlhf",
        "attempt_seconds": ATTEMPT_SECONDS,
        "max_attempts": ATTEMPTS,
        "deadline_seconds": ATTEMPT_SECONDS * ATTEMPTS + ATTEMPTS,
        "allow_private": any(is_private_host(each) for each in urls),
    }
    return {"reward.components": [component]}


def _agents(source: Source) -> Fields:
    """Let the file's agents drive the episodes, and say what they were worth; no other grader is asked."""
    if source.value("--eval_dataset"):
        source.refuse("--eval_dataset", "held-out rows would be answered without the agent: leave it out")
    return {"rollout.agents": {}, "reward.components": [{"kind": "agent"}]}


def _reward_models(source: Source) -> Fields:
    """Make a component of each reward model; OpenRLHF adds their scores up."""
    models = [each.strip() for each in (source.value("--reward_pretrain") or "").split(",") if each.strip()]
    if not models:
        source.lack(
            "reward.components: give --remote_rm_url or --reward_pretrain, or a grader of ours: "
            "--set 'reward.components=[...]'"
        )
        return {}
    fields = lengths(source)
    more = {
        "kind": "reward_model",
        "reads": "text",
        "dtype": fields["model.dtype"],
        "max_tokens": fields["rollout.engine.context_tokens"] + 1,
        "normalise": "stored" if source.value("--normalize_reward") else None,
    }
    names = ["reward_model"] if len(models) == 1 else [f"reward_model_{number}" for number in range(len(models))]
    return {
        "reward.components": [{"name": name, "path": path, **more} for name, path in zip(names, models, strict=True)]
    }


def _shaping(source: Source) -> Fields:
    fields: Fields = {}
    buffer = source.value("--overlong_buffer_len")
    if buffer is not None:
        fields["reward.shaping.overlong"] = {
            "max_length": source.required("--generate_max_len"),
            "buffer": buffer,
            "factor": source.required("--overlong_penalty_factor"),
            "capped": True,
        }
    truncated = source.value("--stop_properly_penalty_coef")
    if truncated is not None:
        fields["reward.shaping.truncated"] = {"scale" if truncated >= 0 else "value": truncated}
    return fields


OPENRLHF: System = make_system(
    "openrlhf",
    (flags.MODELS, flags.DATA, flags.SAMPLING, flags.BATCHES, flags.OPTIMISER, flags.RUNNING, learning.ROWS),
    rules=(
        model, critic, average, data, batches, asynchrony, trainer_devices, sharing, kernels, publication, schedule,
        lengths,
        flags.router, flags.images,
        learning.advantage, learning.policy_loss, learning.kl, rewards, evaluation, tracking,
    ),
)  # fmt: skip
