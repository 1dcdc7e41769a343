"""Read a spec from YAML, JSON or a mapping, and report exactly what is wrong with it.

A problem is one entry per field: its dotted path, the value, and what is allowed; for an unknown key the nearest valid
name.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from flotilla.shared.config.base.model import Config
from flotilla.shared.config.load.overrides import apply_overrides
from flotilla.shared.config.load.paths import resolve_paths
from flotilla.shared.config.load.yaml_text import DocumentLoader, too_large
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import MAX_ERRORS, InvalidSpec, Scalar

_HERE = {
    "optimisation.learning_rate": "lr learningrate learning_rate",
    "optimisation.steps": "max_steps total_training_steps train_steps num_steps "
    "total_epochs num_train_epochs num_epochs max_epochs",
    "optimisation.groups_per_mini_batch": "batch_size train_batch_size ppo_mini_batch_size mini_batch_size "
    "per_device_train_batch_size rollout_batch_size",
    "optimisation.micro_batch_tokens": "gradient_accumulation_steps micro_batch_size ppo_micro_batch_size "
    "ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu micro_train_batch_size",
    "optimisation.epochs_per_step": "ppo_epochs num_iterations",
    "optimisation.warmup_updates": "lr_warmup_steps num_warmup_steps",
    "optimisation.schedule": "lr_scheduler lr_scheduler_type",
    "optimisation.max_grad_norm": "grad_clip clip_grad gradient_clipping",
    "optimisation.activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "algorithm.kl.coefficient": "kl_coef kl_loss_coef init_kl_coef kl_beta beta",
    "algorithm.entropy_coefficient": "entropy_coeff entropy_coef ent_coef",
    "algorithm.advantage.kind": "adv_estimator advantage_estimator",
    "algorithm.policy_loss.clip_low": "cliprange clip_range clip_ratio clip_ratio_low eps_clip epsilon",
    "algorithm.policy_loss.clip_high": "clip_ratio_high epsilon_high eps_clip_high",
    "algorithm.aggregation.mode": "loss_agg_mode loss_type",
    "rollout.group_size": "num_generations n_samples_per_prompt n",
    "rollout.sampling.max_new_tokens": "max_completion_length max_response_length generate_max_len response_length",
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len prompt_length",
    "data.path": "train_files train_dataset dataset_name",
    "data.prompt_column": "prompt_key input_key",
    "data.label_column": "label_key",
    "evaluation.path": "val_files eval_dataset",
    "reward.components": "reward_funcs reward_fn custom_reward_function",
    "model.dtype": "torch_dtype bf16",
    "model.path": "model_name model_name_or_path pretrain",
    "evaluation.every_versions": "eval_steps test_freq eval_freq",
    "checkpoint.every_steps": "save_steps save_freq",
}

OTHER_NAMES = MappingProxyType({name: path for path, names in _HERE.items() for name in names.split()})
"""From a name in TRL, verl, OpenRLHF or ROLL to the equivalent key here."""


MAX_SHOWN = 80
MAX_READ = 200
"""What pydantic reports of one value are several entries, which are compared with each other: of so many at most."""
MOVED = {
    "rollout.num_rollouts": "resources.rollouts.min",
    "optimisation.device": "parallelism.device",
    "optimisation.threads": "parallelism.threads",
}
"""Keys that had another place once, and where they are now."""
PLAIN = {
    "dict_type": "must be a mapping of keys to values",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
}
"""Types of problem that pydantic describes in Python's terms."""
SECTION = "a section with keys of its own is wanted here"
SECTION_WANTED = frozenset({"model_type", "model_attributes_type"})
BRANCH = re.compile(r"[a-z-]+\[.*\]$", re.DOTALL)
"""What pydantic calls one of several ways to read a value."""
DOTTED = re.compile(r"[a-z_]+(?:\.[a-z_]+|\.[0-9]+)+")


def parse_document(text: str, *, source: str, loader: type[DocumentLoader] = DocumentLoader) -> dict[str, Any]:
    """Read YAML (of which JSON is a part) into a mapping.

    Args:
        text: YAML.
        source: its name, for messages.
        loader: which keys it takes.

    Raises:
        InvalidSpec: it does not parse, or is no mapping.
    """
    try:
        document = yaml.load(text, Loader=loader)  # noqa: S506 - a safe loader
    except yaml.YAMLError as error:
        raise InvalidSpec(f"{source} is not valid YAML{_place(error, text)}") from None
    except RecursionError:
        raise InvalidSpec(f"{source} is not valid YAML: brackets or lists are nested too deeply") from None
    if document is None:
        raise InvalidSpec(f"{source} is empty: a mapping of sections is wanted")
    if not isinstance(document, dict):
        raise InvalidSpec(f"{source} must hold a mapping of sections, not {type(document).__name__}")
    if (what := too_large(document)) is not None:
        raise InvalidSpec(f"{source}: {what}")
    return document


def _place(error: yaml.YAMLError, text: str) -> str:
    """Return where a document cannot be read, and why."""
    if isinstance(error, yaml.reader.ReaderError):
        line, letter = text.count("\n", 0, error.position) + 1, text[error.position]
        return f" at line {line}: the character U+{ord(letter):04X} is not allowed"
    mark = getattr(error, "problem_mark", None)
    where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return f"{where}: {getattr(error, 'problem', None) or error}"


def validate_spec(document: Mapping[str, Any]) -> ExperimentSpec:
    """Validate a mapping.

    Raises:
        InvalidSpec: one entry of ``errors`` per offending field.
    """
    try:
        return ExperimentSpec.model_validate(document)
    except ValidationError as error:
        raise invalid_spec(error, ExperimentSpec) from None


STEPS = "optimisation"
"""The section of which ``steps`` can be raised."""


def with_steps(spec: ExperimentSpec, steps: int) -> ExperimentSpec:
    """Raise ``optimisation.steps``.

    Raises:
        InvalidSpec: it is not more than there are: steps that were trained cannot be undone.
    """
    if steps <= spec.optimisation.steps:
        allowed = f"more than the {spec.optimisation.steps} that there are"
        entry: dict[str, Scalar] = {"path": "optimisation.steps", "value": steps, "allowed": allowed}
        raise InvalidSpec(f"optimisation.steps: {allowed} is wanted, got {steps}", errors=[entry])
    return with_changes(spec, {STEPS: {"steps": steps}})


def with_changes(spec: ExperimentSpec, changes: Mapping[str, Any]) -> ExperimentSpec:
    """Merge keys into a spec; a section whose ``kind`` changes is replaced.

    Raises:
        InvalidSpec: the changed spec does not validate.
    """
    return validate_spec(merged(spec.model_dump(mode="json"), changes))


def merged(document: Any, changes: Any, path: str = "") -> Any:
    """Merge keys into a document, unchecked; a section whose ``kind`` changes is replaced."""
    if isinstance(document, list) and isinstance(changes, Mapping) and changes:
        return _merged_list(document, changes, path)
    if not isinstance(document, Mapping) or not isinstance(changes, Mapping):
        return changes
    if "kind" in changes and changes["kind"] != document.get("kind"):
        return changes
    found = {key: merged(document.get(key), value, f"{path}.{key}") for key, value in changes.items()}
    return {**document, **found}


def _merged_list(items: Sequence[Any], changes: Mapping[str, Any], path: str) -> list[Any]:
    """Merge keys into items of a list, which are named by their numbers."""
    found = list(items)
    for name, value in changes.items():
        if not str(name).isdecimal() or int(name) >= len(found):
            allowed = f"the list has {len(found)} items, numbered from 0, and {str(name)[:MAX_SHOWN]!r} is none of them"
            where = path.removeprefix(".")
            raise InvalidSpec(f"{where}: {allowed}", errors=[{"path": where, "value": None, "allowed": allowed}])
        found[int(name)] = merged(found[int(name)], value, f"{path}.{name}")
    return found


def load_spec(path: Path, overrides: Sequence[str] = ()) -> ExperimentSpec:
    """Read a spec file; relative paths in it are taken from its folder.

    Raises:
        InvalidSpec: the file is missing, does not parse or does not validate.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSpec(f"cannot read {path}: {error}") from None
    document = apply_overrides(parse_document(text, source=str(path)), overrides)
    return validate_spec(resolve_paths(document, path.resolve().parent))


def invalid_spec(error: ValidationError, root: type[BaseModel], *, below: str = "") -> InvalidSpec:
    """Turn pydantic's report into ours: path, value, what is allowed.

    Args:
        below: the root's path in its document.
    """
    found = error.errors(include_url=False, include_context=True)
    items = _without_branches([dict(item) for item in found[:MAX_READ]])
    # A list whose items are wrong is also reported as too short, which adds nothing.
    items = [item for item in items if not (item["type"] == "too_short" and _has_deeper(item, items))]
    num_more = len(items) - len(items[:MAX_ERRORS]) + len(found[MAX_READ:])
    entries = [_entry(item, root) for item in items[:MAX_ERRORS]]
    if below:
        entries = [{**entry, "path": f"{below}.{entry['path']}".removesuffix(".")} for entry in entries]
    lines = "; ".join(f"{entry['path'] or 'spec'}: {entry['allowed']}" for entry in entries)
    if num_more:
        return InvalidSpec(f"{lines}; and {num_more} more", errors=entries, num_more_errors=num_more)
    return InvalidSpec(lines, errors=entries)


def _without_branches(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Take out of each location the name that pydantic gives to a way of reading a value, such as ``literal['auto']``.

    Of the ways that a value could be read, keep the most specific problem: what is wrong inside a section, else what
    its own rules say, else what may appear there.
    """
    found: list[dict[str, Any]] = []
    ways: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for item in items:
        location = tuple(item["loc"])
        branch = next((place for place, part in enumerate(location) if BRANCH.match(str(part))), None)
        if branch is None:
            found.append(item)
            continue
        ways.setdefault(location[:branch], []).append({**item, "loc": location[:branch] + location[branch + 1 :]})
    for location, read in ways.items():
        best = [item for item in read if len(item["loc"]) > len(location) or item["type"] == "value_error"]
        words = {"a section" if item["type"] in SECTION_WANTED else str(item["msg"]) for item in read}
        found += best or [{**read[0], "type": "several_ways", "msg": " or ".join(sorted(words))}]
    return found


def _has_deeper(item: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> bool:
    return any(
        len(other["loc"]) > len(item["loc"]) and other["loc"][: len(item["loc"])] == item["loc"] for other in items
    )


def _entry(item: Mapping[str, Any], root: type[BaseModel]) -> dict[str, Scalar]:
    location = [str(part) for part in item["loc"] if part != "[key]"]
    shown_location, section = _walk(root, location)
    path = ".".join(shown_location)
    value = item.get("input")
    shown = value if isinstance(value, str | int | float | bool | None) else type(value).__name__
    if isinstance(shown, str) and len(shown) > MAX_SHOWN:
        shown = shown[:MAX_SHOWN] + "…"
    if item["type"] == "extra_forbidden":
        return {"path": path, "value": shown, "allowed": _unknown_key(shown_location, section, root)}
    if item["type"] == "missing":
        return {"path": path, "value": None, "allowed": "this key is required"}
    message = _message(item, root)
    if not path:
        return {"path": _first_field(message, root), "value": None, "allowed": message}
    says_value = not isinstance(value, Mapping | BaseModel)
    return {"path": path, "value": shown, "allowed": f"{message}, got {shown!r}" if says_value else message}


def _message(item: Mapping[str, Any], root: type[BaseModel]) -> str:
    if item["type"] in SECTION_WANTED:
        return SECTION
    if item["type"] == "too_short":
        return f"at least {item['ctx']['min_length']} of these must be given, {item['ctx']['actual_length']} are"
    if item["type"] in PLAIN:
        return PLAIN[item["type"]]
    if item["type"] != "union_tag_not_found":
        return str(item["msg"]).removeprefix("Value error, ")
    tag = str(item["ctx"]["discriminator"]).strip("'")
    fields = [model.model_fields.get(tag) for model in _models_at(root, item["loc"])]
    kinds = [str(get_args(field.annotation)[0]) for field in fields if field is not None]
    return f"{tag} is missing, which selects the kind: {', '.join(kinds)}"


def _models_at(root: type[BaseModel], location: Sequence[Any]) -> list[type[BaseModel]]:
    """Find the sections that may appear at a location."""
    candidates = [root]
    for part in location:
        fields = [field for model in candidates for name, field in model.model_fields.items() if name == part]
        candidates = [model for field in fields for model in _models(field.annotation)] if fields else candidates
    return list(dict.fromkeys(candidates))


def _first_field(message: str, root: type[BaseModel]) -> str:
    """Find the field that a rule across sections names first."""
    for match in DOTTED.finditer(message):
        candidates = [root]
        for part in match[0].split("."):
            if part.isdigit():  # an item of a list
                continue
            fields = [field for model in candidates for name, field in model.model_fields.items() if name == part]
            candidates = [model for field in fields for model in _models(field.annotation)]
            if not fields:
                break
        else:
            return match[0]
    return ""


def _unknown_key(location: Sequence[str], section: type[BaseModel] | None, root: type[BaseModel]) -> str:
    *parents, key = location
    names = sorted(section.model_fields) if section else []
    elsewhere = [found for found in _paths_named(root, key) if found != ".".join(location)]
    of_section = [found for found in elsewhere if found.startswith(f"{location[0]}.")]
    # The very name in another section is a better guess than a name here that is only a little like it.
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.75 if elsewhere else 0.5)
    if moved := MOVED.get(".".join(location)):
        hint = f"it is {moved} now"
    elif list(location) == ["prepare"]:
        hint = "the command line runs it: send what `flotilla prepare FILE` prints"
    elif (meant := OTHER_NAMES.get(key)) and not of_section:
        hint = f"it is {meant} here"
    elif near:
        hint = f"did you mean {'.'.join([*parents, near[0]])}?"
    elif elsewhere:
        hint = f"did you mean {(of_section or elsewhere)[0]}?"
    else:
        hint = f"allowed here: {', '.join(names)}" if names else "not allowed here"
    return f"unknown key {key!r}; {hint}"


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]


def _walk(root: type[BaseModel], location: Sequence[str]) -> tuple[list[str], type[BaseModel] | None]:
    """Follow a location into the tree.

    Returns:
        The location without the tags that discriminated unions put into it, and the section that holds its last part.
    """
    candidates, shown, section = [root], [], None
    for part in location:
        section = candidates[0] if candidates else section
        fields = [field for model in candidates for name, field in model.model_fields.items() if name == part]
        if fields:
            candidates = [model for field in fields for model in _models(field.annotation)]
        elif not part.isdigit():
            tagged = [m for m in candidates if any(part in get_args(f.annotation) for f in m.model_fields.values())]
            if tagged:
                candidates = tagged
                continue
        shown.append(part)
    return shown, section


def _paths_named(root: type[BaseModel], key: str, prefix: str = "", depth: int = 4) -> list[str]:
    found: list[str] = []
    for name, field in root.model_fields.items():
        path = f"{prefix}{name}"
        if name == key and prefix:
            found.append(path)
        for model in _models(field.annotation) if depth else []:
            if issubclass(model, Config):
                found += _paths_named(model, key, f"{path}.", depth - 1)
    return found
