"""The ``job`` section: what an experiment does with its rows."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from flotilla.shared.config.base.model import Config
from flotilla.shared.config.sections.algorithm import AggregationConfig
from flotilla.shared.config.sections.data import RowsConfig
from flotilla.shared.config.sections.model import ModelConfig, OtherModelConfig


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


class DivergenceConfig(Config):
    """How far the student's distribution p is from the teacher's distribution q, at one token."""

    kind: Literal[
        "forward_kl", "reverse_kl", "skewed_forward_kl", "skewed_reverse_kl", "js_divergence", "adaptive_kl"
    ] = "forward_kl"
    """forward_kl: KL(q, p); reverse_kl: KL(p, q); skewed_forward_kl: KL(q, skew q + (1 - skew) p); skewed_reverse_kl:
    KL(p, skew p + (1 - skew) q); js_divergence: the mean of both distances to their middle; adaptive_kl: forward and
    reverse, weighed by how far p is off at the teacher's likely tokens, and in the tail."""
    top_k: int | None = Field(None, ge=2)
    """Compare the teacher's so many likeliest tokens alone, among which p and q both add up to 1; null: all tokens."""
    temperature: float = Field(1.0, gt=0)
    """Divides the logits of both; the divergence is not scaled for it."""
    teacher_temperature: float = Field(1.0, gt=0)
    """Divides the teacher's logits besides."""
    skew: float = Field(0.1, gt=0, lt=1)
    """Of the skewed ones."""
    tail: float = Field(0.5, gt=0, lt=1)
    """Of adaptive_kl: the least likely tokens of the teacher that have this probability together."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> Self:
        for name, kinds in (("skew", ("skewed_forward_kl", "skewed_reverse_kl")), ("tail", ("adaptive_kl",))):
            if self.kind not in kinds and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} has no effect with {self.kind}, only with {' and '.join(kinds)}: leave it out"
                )
        return self


class AnswersTeacherConfig(OtherModelConfig):
    """A teacher of answers that are written already: at each of their learned tokens, the student learns the
    distribution that the teacher has there."""

    coefficient: float = Field(0.5, gt=0, le=1)
    """Weight of the divergence; the answers' own negative log-likelihood has 1 - coefficient."""
    divergence: DivergenceConfig = DivergenceConfig()
    """How the two distributions are compared."""


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
    distillation: AnswersTeacherConfig | None = None
    """A teacher that the trainer loads, from whose distributions the answers are learned, too; null for none."""

    @property
    def models(self) -> dict[str, ModelConfig]:
        """The models that the trainer loads beside the policy, by the dotted field of their path."""
        return {} if self.distillation is None else {"job.distillation.path": self.distillation.model}


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


class KtoConfig(_FinishedConfig):
    """Kahneman-Tversky optimisation: the policy learns from answers that are marked as desirable or not, held to the
    policy that it began as. With r an answer's log-ratio to the reference, summed over its tokens, and z the reference
    point: desirable_weight (1 - sigmoid(beta (r - z))) for a desirable one, undesirable_weight
    (1 - sigmoid(beta (z - r))) for another, averaged over answers."""

    kind: Literal["kto"]
    response_column: str | None = Field(None, min_length=1)
    """Column with the answer to ``data.prompt_column``; null: that column holds whole conversations, as lists of
    {role, content}, whose last turn is learned."""
    label_column: str = Field("label", min_length=1)
    """Column with whether the answer is desirable: true or false, 1 or 0."""
    beta: float = Field(0.1, gt=0)
    """How strongly the policy is held to the reference."""
    desirable_weight: float = Field(1.0, gt=0)
    """Weight of desirable answers."""
    undesirable_weight: float = Field(1.0, gt=0)
    """Weight of undesirable answers. Its product with their number should be near that of the desirable: `flotilla spec
    check` says how far it is."""
    reference_point: Literal["mismatched", "matched", "zero"] = "mismatched"
    """z, never below 0 and without gradient. mismatched: the mean log-ratio of each prompt of a mini-batch with the
    answer to the next one, an estimate of the policy's KL; matched: of a mini-batch's answers of the other label, as
    they are (KTO for as many of each label); zero: 0 (APO-zero for single answers)."""


class RewardModelJobConfig(_PairsConfig):
    """Trains a reward model on pairs: a head on the model's last token, by the Bradley-Terry likelihood."""

    kind: Literal["reward_model"]


JobConfig = Annotated[
    ReinforcementConfig | EvaluationJobConfig | SftConfig | PreferenceConfig | KtoConfig | RewardModelJobConfig,
    Field(discriminator="kind"),
]
FinishedJob = SftConfig | PreferenceConfig | KtoConfig | RewardModelJobConfig
"""Jobs whose rows hold finished answers."""
