"""The ``job`` section: what an experiment does with its rows."""

from typing import Annotated, Literal

from pydantic import Field

from flotilla.shared.config.base.model import Config
from flotilla.shared.config.sections.algorithm import AggregationConfig
from flotilla.shared.config.sections.data import RowsConfig


class ReinforcementConfig(Config):
    """Rows are prompts: rollouts answer them, graders judge the answers, and the policy learns from that."""

    kind: Literal["rl"] = "rl"


class EvaluationJobConfig(Config):
    """Held-out problems are answered and graded once, as ``evaluation`` says; nothing is trained."""

    kind: Literal["evaluation"]
    response_column: str | None = Field(None, min_length=1)
    """Column with answers that were written before, which are graded as they are: a text, or a list of texts, as many
    in every row. Null: rollouts answer."""


class HeldOutRowsConfig(RowsConfig):
    """Rows that are never trained on, with the columns that training rows have; the trainer computes their loss."""

    every_steps: int | None = Field(None, ge=1)
    """Compute it each time this many steps were made; null: only at the start and at the end."""


class _FinishedConfig(Config):
    """What jobs on finished answers have in common."""

    max_tokens: int | None = Field(None, ge=2)
    """Longest sequence, prompt included; null for no bound."""
    overlong: Literal["filter", "truncate"] = "filter"
    """What becomes of a longer one. filter: it is counted as filtered, and the next row is taken; truncate: it loses
    its last tokens."""
    held_out: HeldOutRowsConfig | None = None
    """Rows to measure the loss on; null for none."""


class SftConfig(_FinishedConfig):
    """Supervised fine-tuning: rows hold answers, and their likelihood is raised. Nothing is sampled or graded."""

    kind: Literal["sft"]
    response_column: str | None = Field(None, min_length=1)
    """Column with the answer to ``data.prompt_column``; null: that column holds whole conversations, as lists of
    {role, content}."""
    train_on: Literal["all", "last", "every_token"] = "all"
    """Which of the assistant's turns are learned: all of them, or the last; every_token: the whole conversation,
    prompts and template, too, but for the first token (TRL: assistant_only_loss false)."""
    aggregation: AggregationConfig = AggregationConfig()
    """How token losses become one number."""


class _PairsConfig(_FinishedConfig):
    """Rows that hold two answers of which one is preferred."""

    chosen_column: str = Field("chosen", min_length=1)
    """Column with the preferred answer: text, or a list of {role, content}. Where ``data.prompt_column`` names this
    column too, both hold whole conversations."""
    rejected_column: str = Field("rejected", min_length=1)
    """Column with the other one."""


class DpoLossConfig(Config):
    """-(1-s) log sigmoid(beta z) - s log sigmoid(-beta z), with z the difference of the log-ratios to the reference."""

    kind: Literal["dpo"] = "dpo"
    beta: float = Field(0.1, gt=0)
    """How strongly the policy is held to the reference."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """s: share of labels that are taken to be wrong (conservative DPO)."""


class IpoLossConfig(Config):
    """(z - 1/(2 beta))^2, with z the difference of the log-ratios to the reference, summed over an answer's tokens."""

    kind: Literal["ipo"]
    beta: float = Field(0.1, gt=0)
    """The margin that is aimed at is 1 / (2 beta)."""


class PreferenceConfig(_PairsConfig):
    """Preference optimisation: the policy learns from pairs, held to the policy that it began as."""

    kind: Literal["preference"]
    loss: Annotated[DpoLossConfig | IpoLossConfig, Field(discriminator="kind")] = DpoLossConfig()
    """From log-probabilities of a pair to its loss."""
    supervised_coefficient: float = Field(0.0, ge=0)
    """Weight of -log_prob of the preferred answers, averaged over their tokens, as a further term."""


class RewardModelJobConfig(_PairsConfig):
    """Trains a reward model on pairs: a head on the model's last token, by the Bradley-Terry likelihood."""

    kind: Literal["reward_model"]


JobConfig = Annotated[
    ReinforcementConfig | EvaluationJobConfig | SftConfig | PreferenceConfig | RewardModelJobConfig,
    Field(discriminator="kind"),
]
FinishedJob = SftConfig | PreferenceConfig | RewardModelJobConfig
"""Jobs whose rows hold finished answers."""
