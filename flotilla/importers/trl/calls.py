"""What calls, attributes and items of a script are, where they are read without running it."""

import ast
from collections.abc import Callable, Mapping
from typing import Any, Final

from flotilla.importers.hydra import NOT_READ
from flotilla.importers.trl.written import Called, Code, is_known

KEPT: Final = frozenset({
    "LoraConfig", "get_peft_model", "BitsAndBytesConfig", "load_dataset", "load_from_disk", "from_pretrained",
    "TrlParser",
    "HfArgumentParser", "ArgumentParser", "ModelConfig", "ScriptArguments", "get_soft_overlong_punishment",
    "get_cosine_scaled_reward", "get_repetition_penalty_reward",
})  # fmt: skip
"""Functions that are read by their arguments."""
PARSERS: Final = ("TrlParser", "HfArgumentParser")
DTYPES: Final = frozenset({"float32", "float16", "bfloat16", "half", "float"})
PLAIN_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "int": int, "float": float, "str": str, "bool": bool, "len": len, "min": min, "max": max, "abs": abs, "sum": sum,
    "list": list, "tuple": list, "dict": dict, "round": round,
}  # fmt: skip
TEXT_METHODS: Final = frozenset(
    {"lower", "upper", "strip", "split", "rstrip", "lstrip", "removesuffix", "removeprefix"}
)


EVALUATES: Final = "eval_strategy"
"""A parameter of configurations that scripts ask, by itself "no"."""
OF_COMMAND_LINE: Final[Mapping[str, Mapping[str, Any]]] = {
    "ModelConfig": {
        "model_revision": "main", "dtype": "float32", "attn_implementation": None, "use_peft": False,
        "load_in_4bit": False, "load_in_8bit": False, "trust_remote_code": False, "model_name_or_path": None,
    },
    "ScriptArguments": {
        "dataset_config": None, "dataset_train_split": "train", "dataset_test_split": "test",
        "dataset_streaming": False, "ignore_bias_buffers": False,
    },
    "Namespace": {},
}  # fmt: skip
"""Defaults of what TRL's own parsers give (trl/trainer/model_config.py, trl/scripts/utils.py)."""


class Calls:
    """Reads calls, with the arguments of the command line and the environment.

    Args:
        value: of an expression.
        fixed: values from the command line, by name.
        environment: what the script would find there.
    """

    def __init__(
        self, value: Callable[[ast.expr], Any], fixed: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        self._value = value
        self._fixed = fixed
        self._environment = environment
        self.imported: dict[str, str] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.asked: set[str] = set()

    def name_of(self, node: ast.expr) -> str:
        """Return the last part of a function's name, as it was before it was imported under another."""
        if isinstance(node, ast.Attribute):
            return node.attr
        name = node.id if isinstance(node, ast.Name) else ""
        return self.imported.get(name, name).rpartition(".")[2]

    def attribute(self, node: ast.Attribute, owner: Any) -> Any:
        """Read an attribute: of parsed arguments or a configuration, or a type of torch's."""
        if isinstance(owner, Called):
            if node.attr in owner.keywords:
                self.asked |= {node.attr} if owner.name in OF_COMMAND_LINE else set()
                return owner.keywords[node.attr]
            if owner.name.endswith("Config") and owner.name != "ModelConfig" and node.attr in (*self._fixed, EVALUATES):
                return self._fixed.get(node.attr, "no")
            if owner.name in OF_COMMAND_LINE:
                self.asked.add(node.attr)
                if node.attr in OF_COMMAND_LINE[owner.name]:
                    return OF_COMMAND_LINE[owner.name][node.attr]
                return Code(node, f"it is an argument of the command line: give {node.attr}=VALUE")
            return Code(node)
        if isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in DTYPES:
            return {"half": "float16", "float": "float32"}.get(node.attr, node.attr)
        if isinstance(node.value, ast.Name) and node.value.id == "TaskType":
            return node.attr
        return Code(node)

    def item(self, node: ast.Subscript, owner: Any, key: Any) -> Any:
        """Read an item: of known data, of the environment, or a split of a dataset."""
        if isinstance(owner, list | str) and isinstance(key, int | slice) and not isinstance(key, bool):
            try:
                return owner[key]
            except IndexError:
                return Code(node)
        if isinstance(owner, dict) and isinstance(key, str | int) and key in owner:
            return owner[key]
        is_rows = isinstance(owner, Called) and owner.name == "load_dataset" and "split" not in owner.keywords
        if is_rows and isinstance(owner, Called) and isinstance(key, str):
            return Called(owner.name, node, owner.positional, {**owner.keywords, "split": key}, owner.unread)
        if ast.unparse(node.value) in {"os.environ", "environ"} and isinstance(key, str):
            return self._of_environment(node, key)
        return Code(node)

    def _of_environment(self, node: ast.expr, name: Any, default: Any = None, *, is_needed: bool = True) -> Any:
        if not isinstance(name, str):
            return Code(node)
        if name in self._fixed:
            self.asked.add(name)
            return self._fixed[name]
        if self._environment.get(name, NOT_READ) != NOT_READ:
            return self._environment[name]
        return Code(node, f"give {name}=VALUE") if is_needed else default

    def result(self, called: Called, node: ast.Call) -> Any:
        """Return what a call gives, as far as it is known; code otherwise."""
        name = called.name
        if name in KEPT or name in self.classes:
            return called
        if name in {"get", "getenv"} and ast.unparse(node.func) in {"os.environ.get", "os.getenv", "environ.get"}:
            return self._of_environment(node, called.argument(0, "key"), called.argument(1, "default"), is_needed=False)
        owner = self._value(node.func.value) if isinstance(node.func, ast.Attribute) else None
        if isinstance(owner, Called) and owner.name in (*PARSERS, "ArgumentParser"):
            return self._parsed(owner, called, node)
        if isinstance(owner, Called) and owner.name == "load_dataset" and name == "select":
            return self._selected(owner, called, node)
        return self._computed(called, node, owner)

    def _computed(self, called: Called, node: ast.Call, owner: Any) -> Any:
        name = called.name
        if name == "getattr" and len(node.args) == 2 and ast.unparse(node.args[0]) == "torch":
            return called.positional[1] if called.positional[1] in DTYPES else Code(node)
        if name in {"get_peft_config", "get_quantization_config"}:
            return self._of_model(called, node)
        if name in {"join", "Path"} and (ast.unparse(node.func) in {"os.path.join", "Path", "pathlib.Path"}):
            is_text = all(isinstance(each, str) for each in called.positional)
            return "/".join(each.rstrip("/") for each in called.positional) if is_text else Code(node)
        return self._changed(called, node, owner)

    def _changed(self, called: Called, node: ast.Call, owner: Any) -> Any:
        """Follow what changes a mapping or list."""
        name = called.name
        if name == "update" and isinstance(owner, dict):
            owner.update(
                {key: each for part in called.positional if isinstance(part, dict) for key, each in part.items()}
            )
            owner.update(called.keywords)
            return None
        if name == "append" and isinstance(owner, list) and called.positional:
            owner.append(called.positional[0])
            return None
        return self._plain(called, node, owner)

    def _plain(self, called: Called, node: ast.Call, owner: Any) -> Any:
        """Compute a function of Python's own over known values."""
        arguments = [*called.positional, *called.keywords.values()]
        is_text = isinstance(owner, str) and called.name in TEXT_METHODS and not called.keywords
        function = PLAIN_FUNCTIONS.get(called.name) if isinstance(node.func, ast.Name) else None
        if called.name == "dict" and function is not None and not called.positional:
            return dict(called.keywords)
        if called.unread is not None or (function is None and not is_text) or not is_known(arguments):
            return Code(node)
        try:
            if function is None:
                made = getattr(owner, called.name)(*arguments)
            else:
                made = function(*called.positional, **called.keywords)
        except (TypeError, ValueError, ArithmeticError):
            return Code(node)
        return made if is_known(made) else Code(node)

    def _selected(self, owner: Called, called: Called, node: ast.Call) -> Any:
        """Read ``select(range(N))``: the first rows."""
        argument = node.args[0] if node.args else None
        is_range = isinstance(argument, ast.Call) and self.name_of(argument.func) == "range" and len(argument.args) == 1
        count = self._value(argument.args[0]) if is_range and isinstance(argument, ast.Call) else None
        if isinstance(count, int) and count > 0 and isinstance(owner.keywords.get("split"), str):
            return Called(owner.name, node, owner.positional, {**owner.keywords, "first": count}, owner.unread)
        return Code(node)

    def _parsed(self, owner: Called, called: Called, node: ast.Call) -> Any:
        """Read what a parser of the command line gives: what the import was given, else the defaults."""
        if owner.name == "ArgumentParser":
            if called.name == "add_argument":
                self._add_argument(owner, called)
                return None
            known = {
                name: self._fixed.get(name, default) for name, default in owner.keywords.get(" options", {}).items()
            }
            self.asked |= set(known)
            return Called(
                "Namespace", node, (), {name: value for name, value in known.items() if value is not Ellipsis}
            )
        if not called.name.startswith("parse_"):
            return Code(node)
        classes = owner.argument(0, "dataclass_types")
        names = (
            [self.name_of(each.node) if isinstance(each, Code) else "" for each in classes]
            if isinstance(classes, list)
            else [""]
        )
        if isinstance(classes, Code):
            names = [self.name_of(classes.node)]
        return [self._dataclass(name, node) for name in names]

    def _dataclass(self, name: str, node: ast.expr) -> Called:
        kind = "ScriptArguments" if name not in {"ModelConfig"} and not name.endswith("Config") else name
        found: dict[str, Any] = {}
        if name in self.classes:
            for each in self.classes[name].body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.value is not None:
                    found[each.target.id] = self._field(each.value)
        if kind in {"ScriptArguments", "ModelConfig"}:
            taken = found if name in self.classes else self._fixed
            found |= {each: value for each, value in self._fixed.items() if each in taken}
        return Called(kind, node, (), {key: value for key, value in found.items() if not isinstance(value, Code)})

    def _field(self, node: ast.expr) -> Any:
        value = self._value(node)
        if isinstance(node, ast.Call) and self.name_of(node.func) == "field":
            given = {each.arg: each.value for each in node.keywords}
            return self._value(given["default"]) if "default" in given else Code(node)
        return value

    def _add_argument(self, owner: Called, called: Called) -> None:
        names = [each for each in called.positional if isinstance(each, str)]
        long = next((each for each in names if each.startswith("--")), names[0] if names else "")
        name = str(called.keywords.get("dest") or long.lstrip("-").replace("-", "_"))
        default = False if called.keywords.get("action") == "store_true" else called.keywords.get("default", Ellipsis)
        owner.keywords.setdefault(" options", {})[name] = default

    def _of_model(self, called: Called, node: ast.Call) -> Any:
        """Read ``get_peft_config(model_args)`` and ``get_quantization_config(model_args)``."""
        arguments = called.argument(0, "model_args")
        if not isinstance(arguments, Called):
            return Code(node)
        return None if called.name == "get_quantization_config" else arguments
