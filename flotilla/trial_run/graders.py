"""Keeps graders as they are, and puts stand-ins where code, a server or a large model of theirs is not here."""

from collections.abc import Mapping
from pathlib import Path

from flotilla.services.trainer.tiny_models.recipe import ModelRecipe
from flotilla.shared.config.sections.judge import JudgeConfig, JudgeModelConfig, RewardModelConfig
from flotilla.shared.config.sections.reward import Component, CustomConfig, RemoteConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.trial_run.edits import Edits
from flotilla.trial_run.families import family_of
from flotilla.trial_run.stand_ins import SAMPLE, grader_for, loaded_by, loading, named

STAND_IN = "stand_in.py"


def replace_graders(
    edits: Edits,
    spec: ExperimentSpec,
    files: Mapping[str, str],
    made: dict[str, str],
    base: Path,
    models: list[ModelRecipe],
) -> None:
    """Change what cannot grade on this machine.

    Args:
        files: that the import makes: adapters among them load a user's file.
        made: files of the trial, to which adapters and stand-ins are added.
        base: folder that relative paths are taken from.
        models: recipes, to which reward models are added.
    """
    if not spec.samples_answers:
        return
    for number, component in enumerate(spec.reward.components):
        field = f"reward.components.{number}"
        match component:
            case CustomConfig():
                _custom(edits, field, component, files, made, base, number)
            case RemoteConfig():
                _stand_in(
                    edits, field, component, made, f"{component.url or 'its URLs'}: no server is asked in a trial"
                )
            case JudgeConfig():
                _stand_in(edits, field, component, made, f"{component.url}: no server is asked in a trial")
            case JudgeModelConfig():
                _stand_in(edits, field, component, made, "a small random judge gives no verdict")
            case RewardModelConfig():
                _reward_model(edits, field, component, base, models, number)
            case _:
                pass


def _custom(
    edits: Edits,
    field: str,
    component: CustomConfig,
    files: Mapping[str, str],
    made: dict[str, str],
    base: Path,
    number: int,
) -> None:
    file, _, function = component.path.rpartition(":")
    adapter = files.get(Path(file).name)
    if adapter is not None:
        own = loaded_by(adapter)
        there = None if own is None else (base / Path(own).expanduser())
        made[Path(file).name] = adapter
        if there is not None and there.is_file():
            made[Path(file).name] = loading(adapter, str(there.resolve()))
        elif there is not None:
            name = f"stand_in_{number}.py"
            made[name] = grader_for(adapter)
            made[Path(file).name] = loading(adapter, name)
            edits.set(f"{field}.path", f"{Path(file).name}:{function}", "")
            edits.note(f"{field}: {own}", own or "", name, "that file is not here: one of the same signature")
        return
    there = base / Path(file).expanduser()
    if there.is_file():
        edits.set(f"{field}.path", f"{there.resolve()}:{function}", "the same file, by its absolute path")
        return
    name = f"stand_in_{number}.py"
    made[name] = named(SAMPLE, function)
    edits.set(f"{field}.path", f"{name}:{function}", "that file is not here: one of the same signature")


def _stand_in(edits: Edits, field: str, component: Component, made: dict[str, str], why: str) -> None:
    made[STAND_IN] = named(SAMPLE, "score")
    stand_in = CustomConfig(
        kind="custom",
        path=f"{STAND_IN}:score",
        name=component.name or component.kind,
        weight=component.weight,
        data_sources=component.data_sources,
    )
    edits.set(field, stand_in.model_dump(mode="json"), why)


def _reward_model(
    edits: Edits, field: str, component: RewardModelConfig, base: Path, models: list[ModelRecipe], number: int
) -> None:
    family = family_of(component.path, base)
    directory = f"reward_model_{number}"
    models.append(
        ModelRecipe(directory=directory, family=family.name, config=family.config, scores=True, seed=3 + number)
    )
    edits.set(f"{field}.path", directory, f"a small random one of the same architecture ({family.name})")
    edits.set(f"{field}.revision", None, "as above")
    edits.set(f"{field}.dtype", "float32", "two small steps take seconds on a CPU")
    edits.set(f"{field}.device", "cpu", "two small steps take seconds on a CPU")
    if edits.at(f"{field}.normalise") == "stored":
        edits.set(f"{field}.normalise", None, "a random model has no stored statistics")
    edits.set(f"{field}.overlong", "truncate", "the small tokenizer makes more tokens of a text")
