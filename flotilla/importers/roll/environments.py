"""ROLL's environments: tags become environments of ours, their managers' limits those of an episode, and seeds rows.

ROLL draws the seed of each episode when it begins; here a task is a row, so the import writes files of rows, each with
a seed and the tag of its environment.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from typing import Any, Final

from flotilla.importers.parameter import Parameter, Verdict
from flotilla.importers.roll import gem, managers
from flotilla.importers.roll.rows import AT_A_TIME, INFER
from flotilla.importers.source import Source

Fields = dict[str, Any]

MANAGER, CUSTOM, HELD_OUT = "env_manager", "custom_envs", "val_env_manager"
TASKS, HELD_OUT_TASKS = "roll_tasks.jsonl", "roll_heldout_tasks.jsonl"
MOST_ROWS: Final = 2048
"""Rows of a file; tasks repeat after that many."""
FIRST_HELD_OUT: Final = 1_000_000_000
CHOICES: Mapping[str, Mapping[str, str]] = {
    "sokoban": {"num_boxes": "num_boxes", "max_steps": "max_steps", "search_depth": "search_depth"},
    "frozen_lake": {"is_slippery": "is_slippery", "size": "size", "p": "frozen"},
}
"""Of each environment, its options by the names of ROLL's."""
DEFAULTS: Mapping[str, Fields] = {
    "sokoban": {"search_depth": 300},
    "frozen_lake": {"is_slippery": True, "format_penalty": -0.01},
}
"""Of ROLL's classes, where they differ from ours."""
WITHOUT_TURNS: Final = {
    "max_steps", "env_instruction", "dim_room", "dim_x", "dim_y", "grid_lookup", "grid_vocab"
}  # fmt: skip
"""Keys of ``env_config`` that are read by themselves."""
ASIDE: Final = {
    "env_groups", "num_env_groups", "max_env_num_per_worker", "max_traj_per_env", "worker_cls", "max_running_requests",
    "num_gpus_per_worker", "world_size", "device_mapping",
}  # fmt: skip
READ: Final = {
    "tags", "num_groups_partition", "n_groups", "group_size", "group_size_redundancy", "format_penalty",
    "generating_args",
}  # fmt: skip
HOW: Final = {"use_thread_lock", "max_env_step_concurrent", "agent_runner_cls"}
SUFFIX = re.compile(r"\{observation\}(\s*\{suffix\})")
TREE: Final = (
    "each tag is an environment of rollout.episodes, and its seeds are rows of a file that is written beside the spec"
)

ROWS: tuple[Parameter, ...] = tuple(
    Parameter(name=name, verdict=Verdict.TRANSLATED, is_tree=True, targets=targets, reason=reason, aliases=aliases)
    for name, targets, reason, aliases in (
        (MANAGER, ("rollout.episodes", "rollout.group_size"),
         "tags and their shares become rows, group_size the group's, group_size_redundancy redundant_members",
         ("train_env_manager",)),
        (CUSTOM, ("rollout.episodes",), TREE, ()),
        (HELD_OUT, ("evaluation",), "tags and their shares become held-out rows", ()),
    )
)  # fmt: skip


ONLY_SAMPLES: Final = (
    "optimisation: there is no actor_train: this file only samples (start_agentic_rollout_pipeline.py), and answers "
    "without training are no experiment; give actor_train.training_args to train"
)


class Tree:
    """What was written below a name: nested, and by which spelling each part was given."""

    def __init__(self, source: Source, name: str) -> None:
        self._source = source
        self.values: dict[str, Any] = {}
        self._spellings = source.trees.get(name, {})
        for spelling, value in self._spellings.items():
            row = source.system.find(spelling)
            assert row is not None
            path = spelling.split(".")[1:]
            _put(self.values, path, value)

    def get(self, *path: str) -> Any:
        """Return what is at a path; None where nothing is."""
        found: Any = self.values
        for part in path:
            found = found.get(part) if isinstance(found, dict) else None
        return found

    def spelling(self, *path: str) -> str | None:
        """Return the parameter that a path was given by, be it one above."""
        for end in range(len(path), -1, -1):
            ending = ".".join(path[:end])
            for each in self._spellings:
                if each.partition(".")[2] == ending:
                    return each
        below = ".".join(path)
        return next((each for each in self._spellings if each.partition(".")[2].startswith(f"{below}.")), None)

    def refuse(self, why: str, *path: str) -> None:
        """Refuse what is at a path."""
        written = self.spelling(*path)
        if written is not None:
            self._source.refuse_written(written, f"{'.'.join(path)}: {why}")

    def put_aside(self, why: str, *path: str) -> None:
        """Call what is at a path unsupported, where it was given by itself."""
        for spelling in self._spellings:
            below = spelling.partition(".")[2]
            if below == ".".join(path) or below.startswith(".".join((*path, ""))):
                self._source.put_aside(spelling, why)


def _put(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    if not path:
        values |= value if isinstance(value, dict) else {}
        return
    *parents, last = path
    for parent in parents:
        values = values.setdefault(parent, {})
    values[last] = value


def is_agentic(source: Source) -> bool:
    """Whether tasks are of environments."""
    return Tree(source, MANAGER).get("tags") is not None


def group_size(source: Source) -> int:
    """Return how many episodes are compared with each other."""
    manager = Tree(source, MANAGER)
    written = manager.get("group_size")
    if isinstance(written, int) and written > 0:
        return written
    return int(source.required("num_return_sequences_in_group"))


def environments(source: Source) -> Fields:
    """Make episodes, their rows, their reward and their evaluation; nothing where ROLL's tasks are rows, too."""
    if not is_agentic(source):
        return {}
    if not any(name.startswith("actor_train.") for name in source.given):
        source.lack(ONLY_SAMPLES)
    manager, custom = Tree(source, MANAGER), Tree(source, CUSTOM)
    tags, held_out = _shares(manager), _held_out_shares(source)
    made = {
        tag: environment for tag in {**tags, **held_out} if (environment := _environment(source, custom, manager, tag))
    }
    if not made.keys() & tags.keys():
        source.lack(
            "rollout.episodes: none of the environments is offered here: --set 'rollout.episodes={kind: environment, "
            "environments: [{environment: FILE.py:Class}]}'"
        )
        return {}
    _manage(manager)
    whole, limits = _whole(source), {custom.get(tag, "max_steps") for tag in made} - {None}
    if len(limits) > 1:
        custom.refuse(
            "one number of turns holds for all environments: give them the same", next(iter(made)), "max_steps"
        )
    episodes: Fields = {"kind": "environment", "environments": list(made.values())}
    if limits:
        episodes["max_turns"] = max(limits)
    if redundant := manager.get("group_size_redundancy"):
        episodes["redundant_members"] = redundant
    groups = max(int(source.required("rollout_batch_size")) // group_size(source), 1)
    count = min(groups * max(int(source.required("max_steps")), 1), MOST_ROWS)
    source.files[TASKS] = _rows(custom, {tag: share for tag, share in tags.items() if tag in made}, count, 0)
    fields: Fields = {
        "rollout.episodes": episodes,
        "rollout.group_size": group_size(source),
        "data.path": TASKS,
        "data.prompt_column": "prompt",
        "data.label_column": None,
        "data.data_source_column": "tag",
        "reward.components": [{"kind": "environment"}],
        **_sampling(source, manager, custom, list(made)),
    }
    if whole is not None:
        fields["rollout.engine.context_tokens"] = whole
    return fields | _evaluation(source, custom, {tag: share for tag, share in held_out.items() if tag in made})


def _whole(source: Source) -> int | None:
    """Return the most tokens of an episode."""
    whole, answer = source.value("sequence_length"), source.value("response_length")
    if whole is None and answer is not None:
        whole = source.required("prompt_length") + answer
    return None if whole is None else int(whole)


def _shares(manager: Tree) -> dict[str, int]:
    """Return how many groups each tag has; equal parts where that is not said."""
    tags = [str(tag) for tag in manager.get("tags") or ()]
    given = manager.get("num_groups_partition") or manager.get("n_groups")
    if not isinstance(given, list) or len(given) != len(tags) or not all(isinstance(each, int) for each in given):
        given = [1] * len(tags)
    shares = dict(zip(tags, given, strict=True))
    divisor = math.gcd(*shares.values()) or 1
    return {tag: share // divisor for tag, share in shares.items() if share > 0}


def _manage(manager: Tree) -> None:
    for key in manager.values:
        if key in ASIDE:
            manager.put_aside(AT_A_TIME, key)
        elif key not in READ:
            manager.refuse("of a manager's keys this one is not offered", key)


def _environment(source: Source, custom: Tree, manager: Tree, tag: str) -> Fields | None:
    """Make one environment; None where it is none of Flotilla's."""
    kind = custom.get(tag, "env_type")
    is_played = gem.is_played(kind)
    if kind not in CHOICES and not is_played:
        custom.refuse(
            f"{kind or 'an unknown environment'} is not offered: use {', '.join(CHOICES)}, one of GEM's, or write a "
            "class of your own with reset and step, as --set 'rollout.episodes.environments=[{environment: "
            "FILE.py:Class}]'",
            tag, "env_type",
        )  # fmt: skip
        return None
    found = managers.manager_of(custom.get(tag, "env_manager_cls"), source.value("adv_estimator"))
    if found.problem is not None:
        custom.refuse(found.problem, tag, "env_manager_cls")
    is_offered = found.problem is None
    template, after = _template(custom, tag, found, may_follow=is_played) if is_offered else (None, "")
    shown: Fields = {"data_sources": [tag], **({} if template is None else {"turn_template": template})}
    if found.memory is not None:
        source.note(managers.UPDATES)
        shown["memory"] = managers.memory(found.memory, custom.get(tag, "history_length"), template)
    _put_how_aside(custom, tag)
    if is_played:
        return _played(source, custom, tag, after) | shown
    options: Fields = dict(DEFAULTS[kind])
    if (penalty := manager.get("format_penalty")) is not None:
        options["format_penalty"] = penalty
    for key, value in (custom.get(tag, "env_config") or {}).items():
        if key in CHOICES[kind]:
            options[CHOICES[kind][key]] = value
        elif key in {"format_penalty", "action_pattern"}:
            options[key] = value
        elif key not in WITHOUT_TURNS:
            custom.refuse(f"{kind} has no such option", tag, "env_config", key)
    _room(custom, tag, options)
    return {"environment": kind, "options": options, **shown}


def _played(source: Source, custom: Tree, tag: str, after: str) -> Fields:
    """Make one of GEM's or ROLL's own, which a file beside the spec plays."""
    wrapper = custom.get(tag, "tool_wrapper")
    tools = None if wrapper is None else gem.tools(wrapper)
    if isinstance(tools, str):
        custom.refuse(tools, tag, "tool_wrapper")
        tools = None
    source.files[gem.FILE] = gem.written()
    return gem.environment(custom.get(tag, "env_type"), custom.get(tag, "env_config") or {}, tools=tools, after=after)


def _put_how_aside(custom: Tree, tag: str) -> None:
    for key in HOW:
        if custom.get(tag, key) is not None:
            custom.put_aside("environments are made for one episode each, and share nothing", tag, key)


def _room(custom: Tree, tag: str, options: Fields) -> None:
    """Make what a room looks like: its sides, and its symbols, which ROLL numbers from wall to player on a target."""
    config = custom.get(tag, "env_config") or {}
    if isinstance(symbols := config.get("grid_lookup"), dict):
        options["symbols"] = "".join(str(symbols[key]) for key in sorted(symbols, key=str))
    sides = config.get("dim_room") or [each for each in (config.get("dim_x"), config.get("dim_y")) if each is not None]
    if not sides:
        return
    if len(set(sides)) > 1:
        custom.refuse("rooms are square: give two equal sides", tag, "env_config", "dim_room")
    options["size"] = sides[0]


def _template(custom: Tree, tag: str, manager: managers.Manager, *, may_follow: bool) -> tuple[str | None, str]:
    """Make what each turn's message is made of.

    Args:
        may_follow: whether the environment's own ``suffix`` may follow the observation.

    Returns:
        The template, if it is not the observation alone, and what the environment puts after each observation.
    """
    written, after = custom.get(tag, "agent_template"), manager.after if may_follow else ""
    if isinstance(written, str) and may_follow and (found := SUFFIX.search(written)):
        written, after = written.replace(found[0], "{observation}", 1), found[1]
    if not isinstance(written, str) or written.strip() == "{observation}":
        return None, after
    most = custom.get(tag, "max_tokens_per_step")
    values = {"max_response_length": str(most or "")}
    if (instruction := _instruction(custom, tag)) is not None:
        values["env_instruction"] = instruction
    if manager.after and not may_follow:
        values["current_observation"] = "{observation}\n"
    template = managers.template(written, manager, values)
    if template is None:
        custom.refuse(f"of a turn {manager.offered} are offered, and the observation must be among them", tag,
                      "agent_template")  # fmt: skip
    return template, after


def _instruction(custom: Tree, tag: str) -> str | None:
    found = custom.get(tag, "env_config", "env_instruction") or custom.get(tag, "env_instruction")
    return str(found) if found else None


def _rows(custom: Tree, shares: Mapping[str, int], count: int, first: int) -> str:
    """Write rows: prompt, seed and tag, the tags by their shares."""
    prompts = {tag: _prompt(custom, tag) for tag in shares}
    tags = islice(cycle([tag for tag, share in shares.items() for _ in range(share)]), count)
    lines = [{"prompt": prompts[tag], "seed": first + number, "tag": tag} for number, tag in enumerate(tags)]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _prompt(custom: Tree, tag: str) -> list[dict[str, str]] | str:
    """Make the messages before the first observation; the environment's own instruction comes where none is given."""
    system = custom.get(tag, "agent_system_template")
    instruction = _instruction(custom, tag)
    messages = [{"role": "system", "content": str(system)}] if system else []
    if instruction and not managers.has_own_prompts(custom.get(tag, "env_manager_cls")):
        messages.append({"role": "user", "content": instruction})
    return messages or ""


def _sampling(source: Source, manager: Tree, custom: Tree, tags: Sequence[str]) -> Fields:
    """Make what bounds a turn, and the manager's own sampling; without it that of actor_infer holds."""
    steps = [each for tag in tags if isinstance(each := custom.get(tag, "max_tokens_per_step"), int)]
    own = manager.get("generating_args") or {}
    if any(name.startswith(f"{INFER}.generating_args.") for name in source.given):
        own = {}  # ROLL puts what actor_infer says in its place
    answer = f"{INFER}.generating_args.max_new_tokens"
    whole = source.value(answer) if source.has(answer) else own.get("max_new_tokens")
    bounds = [*([max(steps)] if steps else []), *([whole] if isinstance(whole, int) else [])]
    most = min(bounds) if bounds else source.value("response_length")
    fields: Fields = {} if most is None else {"rollout.sampling.max_new_tokens": most}
    for key, field in (("temperature", "temperature"), ("top_p", "top_p")):
        if own.get(key) is not None:
            fields[f"rollout.sampling.{field}"] = own[key]
    if own.get("top_k") is not None:
        fields["rollout.sampling.top_k"] = max(own["top_k"], 0)
    return fields


def _held_out_shares(source: Source) -> dict[str, int]:
    return _shares(Tree(source, HELD_OUT)) if source.required("eval_steps") > 0 else {}


def _evaluation(source: Source, custom: Tree, shares: Mapping[str, int]) -> Fields:
    """Make held-out rows, as many as there are groups of held-out environments."""
    manager = Tree(source, HELD_OUT)
    for key in manager.values:
        if key in ASIDE:
            manager.put_aside(AT_A_TIME, key)
    if not shares:
        return {}
    size = int(manager.get("group_size") or 1)
    written = manager.get("num_env_groups") or manager.get("env_groups") or 128
    source.files[HELD_OUT_TASKS] = _rows(custom, shares, min(int(written), MOST_ROWS), FIRST_HELD_OUT)
    fields: Fields = {
        "evaluation.path": HELD_OUT_TASKS,
        "evaluation.every_versions": max(source.required("eval_steps") // source.required("model_update_frequency"), 1),
        "evaluation.greedy": False,
    }
    temperature = (manager.get("generating_args") or {}).get("temperature")
    if temperature is not None:
        fields |= {"evaluation.temperature": temperature} if temperature else {"evaluation.greedy": True}
    return fields if size == 1 else fields | {"evaluation.group_size": size}
