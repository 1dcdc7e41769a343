"""verl's graders: the file's own function, its reward model or verl's scorers; the filter and the overlong penalty."""

from typing import Any

from flotilla.importers.adapter import adapter_name, verl_adapter, verl_batch_adapter
from flotilla.importers.source import Source
from flotilla.importers.values import integer
from flotilla.importers.verl import gdpo
from flotilla.importers.verl.algorithm import ARGUMENTS, OVERLONG, RM
from flotilla.importers.verl.overrides import put
from flotilla.importers.verl.rules import draws_more, mini_batches, mini_of

Fields = dict[str, Any]


def _bound(source: Source) -> Fields:
    """Bound the groups without signal by the prompts of verl's last batch, if it bounds them."""
    most = int(source.required("algorithm.filter_groups.max_num_gen_batches"))
    if most <= 0:
        return {}
    drawn = source.value("data.gen_batch_size") if draws_more(source) else None
    per_step = mini_of(source) * mini_batches(source)
    return {"health.max_groups_without_signal": most * int(drawn or per_step)}


def _filter(source: Source) -> Fields:
    """Make the filter of groups whose metric is the same for all; our own graders' metric is the reward."""
    name = "algorithm.filter_groups.metric"
    if not source.value("algorithm.filter_groups.enable"):
        return {"reward.filter_zero_spread": False}
    metric = source.value(name)
    if metric == "seq_final_reward" and source.value("algorithm.use_kl_in_reward"):
        source.refuse(name, "groups are judged before the KL is taken off the reward: use reward")
    is_shaped = source.value(f"{RM}.reward_manager") == "dapo" and source.value(f"{OVERLONG}.enable")
    if metric in {None, "reward", "seq_reward", "seq_final_reward"} and is_shaped:
        source.refuse(name, "groups are judged before the overlong penalty: use score, or acc")
    is_reward = metric in {None, "reward", "score", "seq_reward", "seq_final_reward"}
    bound = _bound(source)
    if is_reward or source.value("custom_reward_function.path") is None:
        return bound | {"reward.filter_zero_spread": True}
    component = gdpo.TOTAL if gdpo.by_key(source) else "custom"
    return bound | {"reward.filter_zero_spread": False,
            "reward.group_filter": {"kind": "spread_above", "metric": f"{component}/{metric}"}}  # fmt: skip


def _reward_model(source: Source) -> Fields:
    """Make the component of a reward model; its device is the reward service's."""
    path = source.value(f"{RM}.model.path")
    if path is None:
        source.lack(f"reward.components: give {RM}.model.path")
        return {}
    _check_room(source)
    tokenizer, limit = source.value(f"{RM}.model.input_tokenizer"), source.value(f"{RM}.max_length")
    longest = {} if limit is None else {"max_tokens": limit, "overlong": "truncate"}
    reads = "text" if tokenizer is None else "messages"
    return {"reward.components": [{"kind": "reward_model", "path": path, "reads": reads, **longest}]}


def _check_room(source: Source) -> None:
    """Refuse a bound on what the reward model reads that is below what the policy may write."""
    longest = sum(int(source.required(f"data.max_{part}_length")) for part in ("prompt", "response"))
    given = source.trees.get(f"{RM}.rollout", {})
    found = {spelling: integer(spelling, value) for spelling, value in given.items() if spelling.endswith("_length")}
    if len(found) == 2 and sum(value or 0 for value in found.values()) < longest:  # verl adds them up
        for spelling in found:
            source.refuse_written(
                spelling, f"together below the {longest} tokens of prompt and response: give max_length"
            )


def function_or_default(source: Source) -> Fields:
    """Make the grader of the file's own function, or verl's by data source."""
    path = source.value("custom_reward_function.path")
    if path is None:
        return {"reward.components": [{"kind": "verl_default"}]}
    function = source.required("custom_reward_function.name")
    if not function.isidentifier():
        source.refuse("custom_reward_function.name", f"{function!r} is no name of a function")
        return {}
    more = _arguments(source)
    if gdpo.by_key(source):
        return gdpo.components(source, path, function, more)
    file = adapter_name(path, function)
    is_batch = f"{RM}.reward_manager" in source.system.parameters and source.value(f"{RM}.reward_manager") == "batch"
    source.files[file] = (verl_batch_adapter if is_batch else verl_adapter)(path, function, more)
    return {"reward.components": [{"kind": "custom", "path": f"{file}:score"}]}


def _arguments(source: Source) -> Fields:
    """Return what the function is called with besides, nested as it is written."""
    found: Fields = {}
    for spelling, value in source.trees.get(ARGUMENTS, {}).items():
        if spelling.endswith("custom_reward_function.reward_kwargs"):
            found |= value or {}
            continue
        put(found, spelling.partition(".reward_kwargs.")[2], value)
    return found


def rewards(source: Source) -> Fields:
    """Make the graders, the overlong penalty and the filter."""
    fields = _filter(source)
    path = source.value("custom_reward_function.path")
    if source.value(f"{RM}.enable"):
        fields |= _reward_model(source)
        if path is not None:
            source.refuse(f"{RM}.enable", "verl hands its address to the custom function: use one of the two")
    else:
        fields |= function_or_default(source)
    managers = {name: name for name in ("naive", "dapo", "batch", *(["gdpo"] if gdpo.by_key(source) else []))}
    manager = source.choose(f"{RM}.reward_manager", managers)
    if manager == "batch" and path is None:
        source.refuse(f"{RM}.reward_manager", "batch hands lists to custom_reward_function: give one, or use naive")
    if manager == "dapo" and source.value(f"{OVERLONG}.enable"):
        limit = source.value(f"{RM}.reward_kwargs.max_resp_len")
        fields["reward.shaping.overlong"] = {
            "max_length": source.required("data.max_response_length") if limit is None else limit,
            "buffer": source.required(f"{OVERLONG}.len"),
            "factor": source.required(f"{OVERLONG}.penalty_factor"),
            "capped": False,
        }
    return fields
