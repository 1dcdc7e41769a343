"""ROLL's managers of episodes: what they show the policy of the turns before, and what of it becomes a template."""

from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any, Final

STEPWISE: Final = ("gigpo", "step_reinforce")
"""Estimators that compare the steps of an environment, and normalise them on their own."""
UPDATES: Final = (
    "each turn is trained as a sequence of its own, as by ROLL; but ROLL counts an update's turns "
    "(per_device_train_batch_size and its factors), and copies or drops some to fill it (batch_adjust_mode), where "
    "here an update has whole groups of as many episodes"
)
TIPS: Final = (
    "(IMPORTANT TIPS: this action is not valid, your new response *must* strictly adhere to the format according to "
    "env instructions.)"
)
"""What StepEnvManager tells the policy; words that the model is trained on."""


@dataclass(frozen=True)
class Manager:
    """One of ROLL's managers.

    Attributes:
        places: of its ``agent_template``, and ours in their place.
        after: what it puts between an observation and the environment's ``suffix``, which follows it.
        memory: how it writes the turns before, ours; None where it shows the whole conversation.
        problem: why it is not offered.
    """

    places: Mapping[str, str]
    after: str = ""
    memory: Mapping[str, str] | None = None
    problem: str | None = None

    @property
    def offered(self) -> str:
        """Name the places, for people."""
        return ", ".join(f"{{{name}}}" for name in self.places)


OF_ALL: Final = {"max_response_length": ""}
CONVERSATION: Final = Manager(
    {"observation": "{observation}", "turn_idx": "{turn}", "actions_left": "{turns_left}", **OF_ALL}
)
STEPS: Final = Manager(
    {
        "current_observation": "{observation}", "env_instruction": "{instruction}", "history": "{history}",
        "step_count": "{turns_taken}", "current_step": "{turn}", "history_length": "{turns_remembered}", **OF_ALL,
    },
    # Of valid actions ROLL's releases show nothing: they only write those that were none.
    memory={
        "template": "",
        "invalid_template": f"(step: {{turn}}, observation: {{observation}}, action: {{action}}{TIPS}, "
                            "reward: {reward})",
        "separator": ", ",
    },
)  # fmt: skip
OBSERVATIONS: Final = Manager(
    {"current_observation": "{observation}", "history": "{history}"},
    after="\n{suffix}",
    memory={"template": "{observation}", "separator": "\n"},
)
KNOWN: Final[Mapping[str, Manager]] = {
    "TrajEnvManager": CONVERSATION, "StepEnvManager": STEPS, "StepConcatEnvManager": OBSERVATIONS,
}  # fmt: skip


def has_own_prompts(name: object) -> bool:
    """Whether the manager of a class makes a prompt for each turn."""
    return _of(name).memory is not None


def manager_of(name: object, estimator: object) -> Manager:
    """Return what a manager does, by the name of its class.

    Args:
        estimator: that turns are compared by.
    """
    short, found = _short(name), _of(name)
    if short not in KNOWN:
        why = f"{short} shows images, or runs programs of its own: use {', '.join(KNOWN)}"
        return Manager(found.places, problem=why)
    if found.memory is not None and estimator not in STEPWISE:
        why = (
            f"{short} compares each turn's own reward by adv_estimator {estimator}, which is not offered: use "
            f"{' or '.join(STEPWISE)}, or TrajEnvManager"
        )
        return Manager(found.places, problem=why)
    return found


def _short(name: object) -> str:
    return str(name or "TrajEnvManager").rpartition(".")[2]


def _of(name: object) -> Manager:
    return KNOWN.get(_short(name), CONVERSATION)


def template(written: str, manager: Manager, values: Mapping[str, str]) -> str | None:
    """Make a Flotilla template of one that ``str.format`` fills; None where it has other places, or no observation.

    Args:
        values: what is known of places.
    """
    try:
        parts = list(Formatter().parse(written))
    except ValueError:
        return None
    places = {**manager.places, **values}
    made = ""
    for text, name, form, _ in parts:
        if name is not None and (name not in manager.places or form):
            return None
        made += text + ("" if name is None else places[name])
    return made if "{observation}" in made else None


def memory(how: Mapping[str, str], length: Any, shown: str | None) -> dict[str, Any]:
    """Make what turns remember: one less than ROLL's length, which counts the present one."""
    turns = max(length - 1, 0) if isinstance(length, int) and "{history}" in (shown or "") else 0
    return {"turns": turns, **(how if turns else {})}
