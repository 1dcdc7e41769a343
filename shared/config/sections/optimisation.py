"""How a batch of groups becomes an update of the weights."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from flotilla.shared.config.base.model import Config, Fraction


class RouterConfig(Config):
    """Losses of a mixture of experts' routers, of the tokens of each pass: prompts and answers, without padding.

    They are means over the passes of a mini-batch, and so depend on ``micro_batch_tokens``.
    """

    balance: float = Field(0.0, ge=0)
    """Coefficient of the load-balancing loss: the experts' number times the sum, over experts, of the share of tokens
    that chose one and the mean probability that it had."""
    scope: Literal["layer", "model"] = "layer"
    """What both are taken over. layer: each layer has a loss, 1 where all experts are chosen alike often, and they add
    up (Megatron). model: all layers have one, which is then the number of experts that a token chooses
    (transformers)."""
    z: float = Field(0.0, ge=0)
    """Coefficient of the mean squared logarithm of a token's sum of exponentials, added up over the layers."""

    @model_validator(mode="after")
    def _refuse_none(self) -> "RouterConfig":
        if not self.balance and not self.z:
            raise ValueError("optimisation.router has no effect while balance and z are 0: give one, or leave it out")
        if not self.balance and self.scope != "layer":
            raise ValueError("optimisation.router.scope has no effect while balance is 0: leave it out")
        return self


class OptimisationConfig(Config):
    """AdamW with a schedule, on packed micro-batches."""

    steps: int = Field(ge=1)
    """Training steps; each trains R = groups_per_mini_batch * asynchrony.require_batches groups."""
    groups_per_mini_batch: int = Field(16, ge=1)
    """Groups whose gradient makes one optimiser update."""
    epochs_per_step: int = Field(1, ge=1)
    """Passes over a step's groups."""
    shuffle: bool = False
    """In each pass draw again which samples of the step a mini-batch holds, groups apart; false keeps groups together,
    in the order in which they arrived. Advantages are computed before. The draw depends on the seed and the step."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "constant"
    """What follows the warm-up. constant: stay. linear, cosine: fall to ``min_learning_rate_ratio`` at the last update.
    inverse_sqrt: fall as one over the root of the update's number, from the warm-up's end on. wsd: stay, and fall over
    the last ``wsd_decay_updates``."""
    min_learning_rate_ratio: float = Field(0.0, ge=0, le=1)
    """Share of the peak that a schedule ends at; inverse_sqrt does not fall below it."""
    warmup_updates: int = Field(0, ge=0)
    """Updates over which the learning rate rises linearly from ``warmup_start_ratio``."""
    warmup_start_ratio: float = Field(0.0, ge=0, le=1)
    """Share of the peak that the warm-up rises from."""
    cosine_cycles: float = Field(0.5, gt=0)
    """Waves of cosine between the warm-up and the last update: 0.5 falls once, 1 falls and rises again."""
    decay_updates: int | None = Field(None, ge=1)
    """Updates, warm-up included, at whose last one linear, cosine and wsd reach ``min_learning_rate_ratio``, at which
    they stay; null: all of the experiment."""
    wsd_decay_updates: int | None = Field(None, ge=1)
    """Updates over which wsd falls."""
    wsd_decay: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """How wsd falls with the share p of its fall: 1 - p, half a cosine, 2 * 0.5^p - 1, or 1 - sqrt(p)."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay of AdamW's two moments, each at least 0 and below 1."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to AdamW's denominator."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay; not applied to biases and norms, unless ``decay_all``."""
    decay_all: bool = False
    """Apply the weight decay to every parameter, biases and norms, too."""
    masters: Literal["float32", "model"] = "float32"
    """What AdamW updates where the model is bfloat16. float32: a copy of each weight, which is rounded into the model
    after every update. model: the bfloat16 weights themselves, with gradients and moments in bfloat16, too: half the
    memory or less, but updates smaller than about 1/256 of a weight are lost."""
    freeze: tuple[str, ...] = ()
    """Weights that are not trained, by their names in the checkpoint's model, with * and ? for any characters:
    `model.embed_tokens.*`, `*.layers.?.*`. They have no gradient and no optimiser state. A critic trains whole."""
    router: RouterConfig | None = None
    """Losses of a mixture of experts' routers, beside the job's own; null: none."""
    average_decay: Fraction | None = None
    """Keep an exponential moving average of the trained weights (EMA), which each update moves by 1 - average_decay
    towards them; null keeps none. It is in every checkpoint; `flotilla export --average` makes a model of it."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Clip the gradient's global norm; null does not clip."""
    micro_batch_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Upper bound on tokens of one forward pass; a longer sequence makes a micro-batch of its own. auto: as many as the
    device's memory holds, at most 8192 on a CPU and 131072 on a GPU: estimated for the first step, and measured there
    for all later ones. Where a pass does not fit into a GPU it is halved; see docs/ranks.md."""
    activation_checkpointing: bool = False
    """Keep of each layer's activations its input alone and compute the rest again in the backward pass: less memory for
    about a third more computation."""
    compile_layers: bool = False
    """Let torch.compile make one program of each layer (inductor), for rows of any width: faster steps on a GPU after
    the first one, which waits for the compiler. Needs a C++ compiler on a CPU, Triton on a GPU."""
    packing: Literal["auto", "packed", "padded"] = "auto"
    """packed: several sequences per row without padding between them, where answers to one prompt may stand behind it
    together, so that it is computed once; padded: one sequence per row; auto: whichever costs least for the
    mini-batch, by an estimate. A model whose layers are not all plain attention is always padded."""

    @model_validator(mode="after")
    def _refuse_what_has_no_effect(self) -> "OptimisationConfig":
        if self.schedule == "constant" and self.min_learning_rate_ratio:
            raise ValueError(
                "optimisation.min_learning_rate_ratio has no effect while optimisation.schedule is constant: "
                "choose linear or cosine, or leave the ratio out"
            )
        if self.cosine_cycles != 0.5 and self.schedule != "cosine":
            raise ValueError(
                f"optimisation.cosine_cycles has no effect while optimisation.schedule is {self.schedule}: choose "
                "cosine, or leave it out"
            )
        if self.decay_updates is not None and self.schedule in {"constant", "inverse_sqrt"}:
            raise ValueError(
                f"optimisation.decay_updates has no effect while optimisation.schedule is {self.schedule}: choose "
                "linear, cosine or wsd, or leave it out"
            )
        if self.decay_updates is not None and self.decay_updates <= self.warmup_updates:
            raise ValueError(
                f"optimisation.decay_updates ({self.decay_updates}) counts the warm-up, too, and has to be more than "
                f"optimisation.warmup_updates ({self.warmup_updates}): the learning rate would end with the warm-up"
            )
        if (self.wsd_decay_updates is None) == (self.schedule == "wsd"):
            raise ValueError(
                "optimisation.schedule wsd and optimisation.wsd_decay_updates, over which it falls, belong together: "
                "give both or none"
            )
        if self.schedule != "wsd" and self.wsd_decay != "exponential":
            raise ValueError("optimisation.wsd_decay has an effect with optimisation.schedule wsd only: leave it out")
        if self.warmup_start_ratio and not self.warmup_updates:
            raise ValueError("optimisation.warmup_start_ratio has no effect without optimisation.warmup_updates")
        if self.decay_all and not self.weight_decay:
            raise ValueError("optimisation.decay_all has no effect while optimisation.weight_decay is 0: leave it out")
        return self

    @model_validator(mode="after")
    def _refuse_what_excludes_one_another(self) -> "OptimisationConfig":
        if self.masters == "model" and self.average_decay is not None:
            raise ValueError(
                "optimisation.average_decay moves by small steps, which optimisation.masters model has no room for: "
                "leave one of them out"
            )
        if self.router is not None and self.compile_layers:
            raise ValueError(
                "optimisation.router looks into layers, and optimisation.compile_layers makes one program of each: "
                "leave one out"
            )
        return self
