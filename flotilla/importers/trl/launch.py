"""How TRL's launch files are read: a script that makes a trainer, or the YAML of ``trl grpo --config``."""

import ast
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import yaml

from flotilla.importers.composition import Beside, nothing_beside
from flotilla.importers.hydra import problem
from flotilla.importers.source import Given
from flotilla.importers.trl.command import COMMANDS, read_command, variables_of
from flotilla.importers.trl.script import CONFIGS, TRAINERS, Script
from flotilla.importers.trl.slices import CannotSlice, slice_for
from flotilla.importers.trl.written import Called, Code, Function, Rows, described, is_known
from flotilla.shared.config.load.yaml_text import read_value, too_large

TRAINER: Final = "trainer"
"""How the report calls the trainer that is made."""
GROUPS: Final = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class")
FINISHED: Final = ("model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class")
POSITIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "GRPOTrainer": GROUPS, "RLOOTrainer": GROUPS, "SFTTrainer": FINISHED, "RewardTrainer": FINISHED,
    "DPOTrainer": ("model", "ref_model", *FINISHED[1:]),
}  # fmt: skip
"""Arguments of trainers by position (trl/trainer/*_trainer.py)."""
LORA_OF_MODEL: Final[Mapping[str, Any]] = {
    "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": None, "use_rslora": False,
    "use_dora": False, "lora_modules_to_save": None, "load_in_4bit": False, "load_in_8bit": False,
}  # fmt: skip
"""Defaults of ``ModelConfig`` (trl/trainer/model_config.py), which are read where ``use_peft`` is set."""
SHOWS: Final[Mapping[str, frozenset[str]]] = {
    "RLOOTrainer": frozenset({"normalize_advantages", "reward_clip_range"}),
    "GRPOTrainer": frozenset({"reward_funcs", "num_generations", "max_completion_length", "reward_weights"}),
    "KTOTrainer": frozenset({"desirable_weight", "undesirable_weight"}),
    "DPOTrainer": frozenset({"precompute_ref_log_probs", "beta", "loss_weights", "label_smoothing"}),
    "RewardTrainer": frozenset({"center_rewards_coefficient"}),
    "SFTTrainer": frozenset({"packing", "completion_only_loss", "assistant_only_loss", "dataset_text_field"}),
}  # fmt: skip
"""Keys of YAML that show which trainer it is for, the first that has one."""
OF_TRL: Final = frozenset({
    "accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment",
    "get_cosine_scaled_reward", "get_repetition_penalty_reward",
})  # fmt: skip
"""Reward functions of trl.rewards."""
SAME: Final = {"dataset_name": "train_dataset", "model_name_or_path": "model"}
"""What the command line of TRL's own scripts calls an argument of a trainer."""
SECTIONS: Final = frozenset({"model_init_kwargs", "chat_template_kwargs", "lr_scheduler_kwargs", "peft_config"})
"""Mappings whose keys are parameters."""
OVERLONG_OF_COMMAND: Final = {"max_completion_len": 1280, "soft_punish_cache": 256}
"""What ``trl grpo`` gives ``get_soft_overlong_punishment`` (trl/scripts/grpo.py)."""


def read_trl(
    text: str,
    overrides: Sequence[str],
    environment: Mapping[str, str],
    *,
    source: str,
    beside: Beside = nothing_beside,
    is_script: bool = False,
    program: int | None = None,
) -> list[Given]:
    """Read a script of Python's, YAML, or a shell script that starts one of them.

    Args:
        text: what the file holds.
        overrides: ``NAME=VALUE``: what the script would find on its command line, in its environment or only when it
            runs; else a parameter.
        environment: of the import.
        source: the file's name; its suffix tells scripts from YAML.
        beside: finds what a shell script names.
        is_script: whether it is a shell script.
        program: number of the program that is meant, where a shell script starts several; counted from 1.

    Raises:
        InvalidSpec: it cannot be read, or makes no trainer or several.
    """
    if is_script:
        variables, overrides = variables_of(overrides, text)
        found = read_command(text, variables, environment, source=source, beside=beside, program=program)
        flags = {SAME.get(name, name): _value_of(value) if isinstance(value, str) else value
                 for name, value in found.values.items() if name not in found.unknown}  # fmt: skip
        unknown = [Given(None, SAME.get(name, name), "script", refusal=why) for name, why in found.unknown.items()]
        if found.trainer:
            fixed = _fixed(overrides, source)
            named = Given(found.trainer, TRAINER, "script")
            return [named, *unknown, *_of_values({**flags, **fixed}, fixed)]
        return [*unknown, *_of_python(found.text, flags | _fixed(overrides, source), environment, source=found.source)]
    fixed = _fixed(overrides, source)
    if not source.endswith(".py"):
        return _of_yaml(text, fixed, source=source)
    return _of_python(text, fixed, environment, source=source)


def _fixed(overrides: Sequence[str], source: str) -> dict[str, Any]:
    fixed = {}
    for each in overrides:
        name, equals, written = each.partition("=")
        if not equals or not name.strip():
            raise problem("command line", each, f"beside {source} there may be NAME=VALUE")
        fixed[name.strip().lstrip("-")] = _value_of(written)
    return fixed


def _of_python(text: str, fixed: Mapping[str, Any], environment: Mapping[str, str], *, source: str) -> list[Given]:
    script = Script(text, fixed, environment, source=source)
    if len(script.trainers) != 1:
        made = ", ".join(f"{each.name} in line {each.node.lineno}" for each in script.trainers) or "none"
        raise problem(source, made, "the script must make one trainer of TRL's, such as GRPOTrainer(...)")
    given = list(_Reader(script, posixpath.dirname(source)).given(script.trainers[0]))
    unused = {name: value for name, value in fixed.items() if name not in script.calls.asked}
    replaced = unused.keys() | {SAME[name] for name in unused if name in SAME}
    kept = [each for each in given if each.spelling not in replaced]
    return kept + [Given(value, name, "command line") for name, value in unused.items()]


def _value_of(written: str) -> Any:
    try:
        found = read_value(written)
    except (yaml.YAMLError, RecursionError):
        return written
    return written if too_large(found) else found


def _of_yaml(text: str, fixed: Mapping[str, Any], *, source: str) -> list[Given]:
    try:
        found = read_value(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise problem(source, source, f"it is no YAML: {error}") from None
    why = too_large(found) if isinstance(found, dict) else "the YAML must be a mapping of parameters"
    if why is not None or not isinstance(found, dict):
        raise problem(source, source, str(why))
    values: dict[str, Any] = {str(name): value for name, value in found.items()} | dict(fixed)
    named = str(values.pop(TRAINER, "")).lower()
    trainer = COMMANDS.get(named.removesuffix("trainer")) or next(
        (name for name, keys in SHOWS.items() if keys & values.keys()), None
    )
    if trainer is None:
        raise problem(source, named or "nothing", f"say whose it is: {TRAINER}={'|'.join(COMMANDS)}")
    return [Given(trainer, TRAINER, "file"), *_of_values(values, fixed)]


def _of_values(values: Mapping[str, Any], fixed: Mapping[str, Any]) -> list[Given]:
    given: list[Given] = []
    for name, value in values.items():
        where = "command line" if name in fixed else "file"
        if name == "reward_funcs":
            names = value if isinstance(value, list) else [value]
            given.append(Given([_named_function(str(each)) for each in names], name, where))
        elif name in SECTIONS and isinstance(value, dict):
            given += [Given(each, f"{name}.{key}", where) for key, each in value.items()]
        else:
            given.append(Given(value, name, where))
    if values.get("use_peft") is True:
        given += [Given(v, n, "default of TRL's ModelConfig") for n, v in LORA_OF_MODEL.items() if n not in values]
    return given


def _named_function(name: str) -> Any:
    node = ast.Name(name, ast.Load(), lineno=0)
    if name in OF_TRL:
        return Called(name, node, (), dict(OVERLONG_OF_COMMAND) if name == "get_soft_overlong_punishment" else {})
    module, dot, function = name.rpartition(".")
    if not dot or not re.fullmatch(r"[A-Za-z_][\w.]*", name):
        return Function(name, "", "it is none of trl.rewards, and no module and function with a dot between them")
    return Function(function, f"from {module} import {function}\n\nfunction = {function}")


class _Reader:
    """Flattens a trainer and what it is given into parameters."""

    def __init__(self, script: Script, folder: str) -> None:
        self._script = script
        self._folder = folder

    def given(self, trainer: Called) -> Iterator[Given]:
        """List the parameters: which trainer, its arguments, those of its configuration, model and adapters."""
        names = POSITIONS.get(trainer.name, GROUPS)
        arguments = dict(zip(names, trainer.positional, strict=False)) | trainer.keywords
        yield Given(trainer.name, TRAINER, f"line {trainer.node.lineno}")
        if trainer.unread is not None:
            yield self._unknown("**", trainer.unread)
        for name, value in arguments.items():
            if name in {"args", "config"}:
                yield from self._config(value)
            elif name == "model":
                yield from self._model(value)
            elif name == "peft_config":
                yield from self._adapters(value)
            elif name == "reward_funcs":
                each = value if isinstance(value, list) else [value]
                yield Given([self._function(one) for one in each], name, _where(value))
            elif name in {"train_dataset", "eval_dataset"}:
                yield Given(self._rows(value), name, _where(value))
            elif isinstance(value, Called) and value.name == "from_pretrained":
                yield self._one(name, value.argument(0, "pretrained_model_name_or_path"))
            else:
                yield Given(value if is_known(value) else described(value), name, _where(value))

    def _config(self, value: Any) -> Iterator[Given]:
        if value is None:
            return
        if not isinstance(value, Called) or value.name not in CONFIGS:
            yield self._unknown("args", value)
            return
        if value.unread is not None:
            yield self._unknown("args", value.unread)
        arguments = ({"output_dir": value.positional[0]} if value.positional else {}) | value.keywords
        for name, each in arguments.items():
            if isinstance(each, dict) and name in SECTIONS:
                yield from (self._one(f"{name}.{key}", one) for key, one in each.items())
            else:
                yield self._one(name, each)

    def _model(self, value: Any) -> Iterator[Given]:
        if isinstance(value, Called) and value.name == "get_peft_model":
            yield from self._model(value.argument(0, "model"))
            second = value.argument(1, "peft_config")
            yield from self._adapters(second if second is not None else value)
            return
        if isinstance(value, Called) and value.name == "from_pretrained":
            path = value.argument(0, "pretrained_model_name_or_path", value.keywords.get("model_name"))
            yield self._one("model", path)
            taken = {"pretrained_model_name_or_path", "model_name"}
            for name, each in value.keywords.items():
                if name not in taken:
                    yield self._one(f"model_init_kwargs.{name}", each)
            return
        yield self._one("model", value)

    def _adapters(self, value: Any) -> Iterator[Given]:
        if value is None:
            return
        if isinstance(value, Called) and value.name == "ModelConfig":
            if value.keywords.get("use_peft"):
                yield from (self._one(name, value.keywords.get(name, each)) for name, each in LORA_OF_MODEL.items())
            return
        if not isinstance(value, Called) or value.name not in {"LoraConfig", "get_peft_model"}:
            yield self._unknown("peft_config", value)
            return
        for name, each in value.keywords.items():
            if name not in {"model", "peft_config"}:
                yield self._one(f"peft_config.{name}", each)

    def _one(self, name: str, value: Any) -> Given:
        if isinstance(value, Called) and value.name == "BitsAndBytesConfig":
            known = {key: each for key, each in value.keywords.items() if is_known(each)}
            return Given(known, name, _where(value))
        return Given(value, name, _where(value)) if is_known(value) else self._unknown(name, value)

    def _unknown(self, name: str, value: Any) -> Given:
        why = (
            value.why if isinstance(value, Code) and value.why else f"only a run of the script knows: give {name}=VALUE"
        )
        shown = described(value)
        return Given(shown, name, _where(value), refusal=f"{shown}: {why}")

    def _function(self, value: Any) -> Any:
        if isinstance(value, str) or (isinstance(value, Called) and value.name in OF_TRL):
            return value
        if not isinstance(value, Code | Called):
            return Function(described(value), "", "it is no function that is known before the script runs")
        imported = self._script.calls.imported.get(ast.unparse(value.node), "")
        if imported.startswith("trl.") and (name := imported.rpartition(".")[2]) in OF_TRL:
            return Called(name, value.node)
        made, why = self._slice(value.node, "function")
        return Function(ast.unparse(value.node)[:60], made, why)

    def _rows(self, value: Any) -> Any:
        if isinstance(value, Called) and value.name == "load_dataset" and is_known([*value.positional, value.keywords]):
            return value
        if not isinstance(value, Code | Called):
            return value
        made, why = self._slice(value.node, "rows")
        return Rows(repr(value), made, why)

    def _slice(self, node: ast.expr, name: str) -> tuple[str, str]:
        forbidden = TRAINERS | CONFIGS
        try:
            made = slice_for([node], self._script.statements, self._script.names, forbidden)
        except CannotSlice as error:
            return "", str(error)
        # Modules of the user's lie beside the script.
        beside = (
            f"_sys.path.insert(0, str(_Path(__file__).resolve().parent / {self._folder!r}))\n\n" if self._folder else ""
        )
        return f"{beside}{made}\n\n{name} = {ast.unparse(node)}".strip(), ""


def _where(value: Any) -> str:
    return f"line {value.node.lineno}" if isinstance(value, Code | Called) and value.node.lineno else "file"
