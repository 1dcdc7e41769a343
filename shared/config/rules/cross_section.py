"""Rules across sections of a spec: values that another section makes impossible, or without effect.

Each names both fields and the way out.
"""

from flotilla.shared.config.rules.compute import (
    check_compute,
    check_images,
    check_offload,
    check_quantisation,
    check_router_replay,
)
from flotilla.shared.config.rules.publication import check_adapters, check_engine_group
from flotilla.shared.config.sections.advantage import GdpoConfig, RemaxConfig
from flotilla.shared.config.sections.data import check_data_source_column
from flotilla.shared.config.sections.engine import ServerEngineConfig, SglangEngineConfig
from flotilla.shared.config.sections.episodes import SingleTurnConfig, ToolEpisodesConfig, check_sequences
from flotilla.shared.config.sections.publication import TransportChoice
from flotilla.shared.config.sections.reward import (
    AgentRewardConfig,
    CodeConfig,
    EnvironmentRewardConfig,
    MatchConfig,
    VerlDefaultConfig,
    may_read_label,
)
from flotilla.shared.config.tree import Sections
from flotilla.shared.schemas.engine import EngineCapability


def check_sections(spec: Sections) -> None:
    """Check all rules.

    Raises:
        ValueError: the first that is broken.
    """
    _weights(spec)
    check_adapters(spec)
    _critic(spec)
    _held_out_sets(spec)
    _overrides(spec)
    _sharing(spec)
    _contents(spec)
    check_compute(spec.model, spec.parallelism)
    if spec.optimisation.masters == "model" and spec.model.dtype != "bfloat16":
        raise ValueError(
            f"optimisation.masters model has an effect with bfloat16 weights only, and model.dtype is "
            f"{spec.model.dtype}: set it to bfloat16, or leave masters out"
        )
    if spec.optimisation.router is not None and spec.parallelism.sequence_parallel > 1:
        raise ValueError(
            "optimisation.router counts a pass's tokens on one rank, and parallelism.sequence_parallel "
            f"{spec.parallelism.sequence_parallel} divides each sequence: leave one of them out"
        )
    check_quantisation(spec.model, spec.parallelism.offload, compiles_layers=spec.optimisation.compile_layers)
    check_offload(
        spec.parallelism.offload,
        turns=spec.resources.turns,
        has_adapters=spec.model.lora is not None,
        needs_reference=spec.needs_reference,
    )
    _rows(spec)
    check_router_replay(
        spec.algorithm,
        spec.rollout,
        spec.data,
        spec.optimisation,
        spec.parallelism,
        learns_from_rewards=spec.trains and spec.finished_job is None,
    )
    if not spec.samples_answers and not spec.data.holds_groups:
        return
    _engine(spec)
    _lengths(spec)
    _episodes(spec)
    _memory(spec)
    _labels(spec)
    _sandboxes(spec)
    _prompts(spec)
    _agents(spec)
    if spec.finished_job is None and spec.trains:
        _log_probs(spec)
        _teachers(spec)
        if spec.algorithm.is_pure_distillation:
            _pure_distillation(spec)
        else:
            _advantage(spec)
        _shuffle(spec)


def _weights(spec: Sections) -> None:
    publication = spec.asynchrony.publication
    check_engine_group(spec.rollout.engine, publication, turns=spec.resources.turns)
    if spec.model.lora is not None and max(spec.parallelism.tensor_parallel, spec.parallelism.expert_parallel) > 1:
        raise ValueError(
            "parallelism.tensor_parallel and expert_parallel divide the layers that transformers' plans name, and "
            "model.lora puts others in their place: leave them out, parallelism.ranks alone shards the weights (FSDP2)"
        )
    if spec.optimisation.freeze and spec.model.lora is not None:
        raise ValueError(
            "optimisation.freeze has no effect while model.lora is set, whose adapters alone are trained: remove it, "
            "or leave layers out with model.lora.exclude"
        )
    if publication.transport is TransportChoice.NCCL and not spec.is_on_gpus:
        raise ValueError(
            f"asynchrony.publication.transport nccl needs GPUs, but parallelism.device is "
            f"{spec.parallelism.device} and rollout.engine.device {spec.rollout.engine.device}: set both to "
            "cuda devices, or transport to auto"
        )
    if publication.wire_dtype is not None and publication.wire_dtype == spec.model.dtype:
        raise ValueError(
            f"asynchrony.publication.wire_dtype {publication.wire_dtype} has no effect while model.dtype is the "
            "same: leave it out"
        )


def _critic(spec: Sections) -> None:
    if spec.parallelism.critic is not None and not spec.algorithm.needs_critic:
        raise ValueError(
            "parallelism.critic has no effect without a critic, which algorithm.advantage.kind gae alone has: leave it "
            "out"
        )


def _engine(spec: Sections) -> None:
    engine = spec.rollout.engine
    if spec.asynchrony.publication.overlap_load and EngineCapability.SPARE_COPY not in engine.CAPABILITIES:
        raise ValueError(
            f"asynchrony.publication.overlap_load needs an engine with a spare copy of its weights, which "
            f"rollout.engine.kind {engine.kind} has not: leave it out, or set it to false"
        )


def _log_probs(spec: Sections) -> None:
    if spec.rollout.records_the_cut and spec.algorithm.takes_recorded_for_policy:
        raise ValueError(
            f"rollout.engine.kind {spec.rollout.engine.kind} gives log-probabilities after top-k, top-p, min-p and "
            f"penalties where rollout.sampling.temperature is not 1 but {spec.rollout.sampling.temperature}, and "
            f"algorithm.old_log_probs {spec.algorithm.old_log_probs} takes them for the policy's: set old_log_probs "
            "to recompute, or temperature to 1, or leave these out, or use another engine"
        )


def _overrides(spec: Sections) -> None:
    engine = spec.rollout.engine
    if spec.model.overrides and isinstance(engine, ServerEngineConfig) and engine.url is not None:
        raise ValueError(
            "model.overrides does not reach the server at rollout.engine.url, which has read its model: leave one of "
            "the two out"
        )


def _sharing(spec: Sections) -> None:
    turns, engine = spec.resources.turns, spec.rollout.engine
    if turns is None:
        return
    if spec.data.holds_groups:
        name = "data.dump" if spec.data.dump is not None else "data.from"
        raise ValueError(
            f"{turns} lets trainer and rollouts take turns, and training from {name} needs no rollouts: leave it out"
        )
    if not spec.trains or spec.finished_job is not None:
        kind, why = (
            ("evaluation", "there is no trainer")
            if spec.finished_job is None
            else (spec.finished_job.kind, "training needs no rollouts")
        )
        raise ValueError(f"{turns} lets trainer and rollouts take turns, and with job.kind {kind} {why}: leave it out")
    _lending(spec)
    if EngineCapability.SLEEP not in engine.CAPABILITIES:
        raise ValueError(
            f"resources.sharing time needs an engine that can sleep, which rollout.engine.kind {engine.kind} cannot: "
            "use torch, or leave sharing out"
        )
    if isinstance(engine, ServerEngineConfig) and engine.url is None and engine.device == "cpu":
        raise ValueError(
            f"resources.sharing time needs an engine that can free its memory, which rollout.engine.kind {engine.kind} "
            "can on GPUs only, and rollout.engine.device is cpu: use torch, leave sharing out, or set device to cuda"
        )
    if isinstance(engine, SglangEngineConfig) and engine.url is not None:
        raise ValueError(
            "resources.sharing time puts the engine to sleep, and the SGLang server at rollout.engine.url cannot "
            "report whether another client left it asleep: leave one of the two out"
        )
    if spec.rollout.agents is not None:
        raise ValueError(
            f"{turns} puts the engine to sleep between two shifts, and rollout.agents lets agents ask it at any time: "
            "remove one of the two"
        )
    if spec.asynchrony.publication.overlap_load and spec.resources.lending is None:
        raise ValueError(
            f"asynchrony.publication.overlap_load has no effect with {turns}, since the engine is asleep when new "
            "weights come: leave it out"
        )


def _lending(spec: Sections) -> None:
    if spec.resources.lending is None:
        return
    engine = spec.rollout.engine
    if engine.kind != "torch":
        raise ValueError(
            "resources.lending puts engines to sleep and wakes them within a step, which is done with "
            f"rollout.engine.kind torch alone, not with {engine.kind}: use torch, or leave lending out"
        )
    if spec.parallelism.nodes > 1:
        raise ValueError(
            f"resources.lending lends the devices of one host, and parallelism.nodes is {spec.parallelism.nodes}: "
            "leave one of the two out"
        )
    if engine.threads == "auto" and not engine.device.startswith("cuda"):
        raise ValueError(
            "resources.lending lends cores that the trainer leaves idle, and with rollout.engine.threads auto rollouts "
            "of its host take these by themselves: set threads to a number, rollout.engine.device to cuda, or leave "
            "lending out"
        )


def _shuffle(spec: Sections) -> None:
    if spec.optimisation.shuffle and spec.asynchrony.require_batches == 1:
        raise ValueError(
            "optimisation.shuffle has no effect while asynchrony.require_batches is 1, since a step is then one "
            "mini-batch: remove shuffle, or raise require_batches"
        )


def _teachers(spec: Sections) -> None:
    distillation = spec.algorithm.distillation
    if distillation is None:
        return
    if distillation.servers and spec.rollout.sampling.temperature != 1.0:
        raise ValueError(
            "algorithm.distillation.servers answer log-probabilities at temperature 1, and "
            f"rollout.sampling.temperature is {spec.rollout.sampling.temperature:g}, so that student and teacher would "
            "not be comparable: set it to 1, or let the trainer load the teacher (algorithm.distillation.path)"
        )
    if distillation.data_sources is not None and spec.data.data_source_column is None:
        name = "teachers" if distillation.teachers else "servers"
        raise ValueError(
            f"algorithm.distillation.{name} are chosen by data source, and "
            "data.data_source_column is not set: name the column there, or have one teacher of all"
        )


def _pure_distillation(spec: Sections) -> None:
    unused = {
        "reward.filter_zero_spread": spec.reward.filter_zero_spread,
        "reward.group_filter": spec.reward.group_filter is not None,
        "health.max_groups_without_signal": spec.health.max_groups_without_signal is not None,
    }
    for field in (field for field, is_set in unused.items() if is_set):
        raise ValueError(
            f"{field} judges groups by their rewards, and with algorithm.distillation.pure every group teaches: remove "
            "it, or set pure to false"
        )


def _advantage(spec: Sections) -> None:
    advantage, size = spec.algorithm.advantage, spec.rollout.group_size
    if isinstance(advantage, GdpoConfig):
        names = [component.name or component.kind for component in spec.reward.components]
        unknown = [name for name in advantage.components if name not in names]
        if unknown:
            raise ValueError(
                f"algorithm.advantage.components names {unknown[0]!r}, which no entry of reward.components is called: "
                f"use {', '.join(names)}, or give a component that name"
            )
    if size == 1 and not advantage.learns_from_one:
        of_teacher = ", or set algorithm.distillation.pure to true" if spec.algorithm.distillation is not None else ""
        raise ValueError(
            f"rollout.group_size 1 leaves algorithm.advantage.kind {advantage.kind} nothing to compare, and so nothing "
            f"to learn of rewards: raise group_size to at least 2, or use reinforce_plus_plus or gae{of_teacher}"
        )


def _environment_component(spec: Sections) -> None:
    """Let a component of kind environment and what gives it its rewards go together."""
    episodes = spec.rollout.episodes
    has_environment = episodes.kind == "environment"
    is_checked = isinstance(episodes, ToolEpisodesConfig) and bool(episodes.checks)
    takes_check = False
    for where, component in spec.reward.graders.items():
        takes_check = takes_check or isinstance(component, EnvironmentRewardConfig)
        if isinstance(component, EnvironmentRewardConfig) and not has_environment and not is_checked:
            raise ValueError(
                f"{where} is of kind environment, and rollout.episodes.kind {episodes.kind} has "
                "none, so that nothing would be graded: set rollout.episodes.kind to environment, give a tool of kind "
                "code_interpreter a check_column, or use another component"
            )
    if is_checked and not takes_check:
        raise ValueError(
            "rollout.episodes.tools has a check_column, whose grade no entry of reward.components takes: add one of "
            "kind environment, or leave check_column out"
        )


def _episodes(spec: Sections) -> None:
    episodes, kind = spec.rollout.episodes, spec.algorithm.advantage.kind
    has_environment = episodes.kind == "environment"
    _environment_component(spec)
    if kind in {"gigpo", "step_reinforce"} and not has_environment:
        raise ValueError(
            f"algorithm.advantage.kind {kind} compares the turns of an environment, and rollout.episodes.kind is "
            f"{episodes.kind}: use {'grpo' if kind == 'gigpo' else 'reinforce'}, or set rollout.episodes.kind to "
            "environment"
        )
    if isinstance(episodes, SingleTurnConfig):
        return
    if spec.rollout.agents is not None:
        raise ValueError(
            f"rollout.agents lets agents drive the episodes, so that rollout.episodes.kind {episodes.kind} has no "
            "effect: remove one of the two"
        )
    if spec.data.input_template is not None:
        raise ValueError(
            f"data.input_template has no messages, so that no turn can follow another, and rollout.episodes.kind is "
            f"{episodes.kind}: remove input_template, or set rollout.episodes.kind to single_turn"
        )
    context = spec.rollout.engine.context_tokens
    if episodes.max_tokens is not None and episodes.max_tokens > context:
        raise ValueError(
            f"rollout.episodes.max_tokens {episodes.max_tokens} is more than rollout.engine.context_tokens {context} "
            "holds: lower the first or raise the second"
        )
    if (most := episodes.max_response_tokens) is not None and most >= (episodes.max_tokens or context):
        raise ValueError(
            f"rollout.episodes.max_response_tokens {most} bounds nothing: an episode has at most "
            f"{episodes.max_tokens or context} tokens (max_tokens, or rollout.engine.context_tokens): lower or drop it"
        )


def _memory(spec: Sections) -> None:
    distillation = spec.algorithm.distillation
    check_sequences(
        spec.rollout.episodes,
        spec.algorithm.advantage.kind,
        asks_teachers=distillation is not None and bool(distillation.servers),
        cuts=spec.data.overlong.kind == "truncate",
    )


def _labels(spec: Sections) -> None:
    for where, component in spec.reward.graders.items():
        if component.data_sources is not None and spec.data.data_source_column is None:
            raise ValueError(
                f"{where}.data_sources chooses by data source, and data.data_source_column is not set, so that nothing "
                "would be graded: name the column there, or remove data_sources"
            )
        if isinstance(component, VerlDefaultConfig) and spec.data.data_source_column is None:
            raise ValueError(
                f"{where} is of kind verl_default, which chooses a scorer by data source, and data.data_source_column "
                "is not set: name the column there (data.format verl does)"
            )
        compares = isinstance(component, MatchConfig | CodeConfig | VerlDefaultConfig) and may_read_label(component)
        if compares and spec.data.label_column is None:
            raise ValueError(
                f"{where} is of kind {component.kind}, which compares with a label, and data.label_column is null: "  # type: ignore[union-attr]
                "name the column there"
            )


def _lengths(spec: Sections) -> None:
    most = spec.rollout.sampling.max_new_tokens
    wanted = spec.evaluation.max_new_tokens if spec.evaluation else None
    context = spec.rollout.engine.context_tokens
    if wanted is not None and wanted >= context:
        raise ValueError(
            f"evaluation.max_new_tokens {wanted} leaves no room for a prompt in rollout.engine.context_tokens "
            f"{context}: lower the first or raise the second"
        )
    overlong = spec.reward.shaping.overlong if spec.reward.shaping else None
    if overlong is not None and overlong.max_length - overlong.buffer >= most:
        raise ValueError(
            f"reward.shaping.overlong has no effect: its penalty starts after {overlong.max_length - overlong.buffer} "
            f"tokens, which rollout.sampling.max_new_tokens {most} lets no answer pass: lower overlong.max_length"
        )
    mask = spec.reward.sample_mask
    if mask is not None and mask.max_length is not None and mask.max_length > most:
        raise ValueError(
            f"reward.sample_mask.max_length {mask.max_length} is more than rollout.sampling.max_new_tokens {most}, so "
            "that no answer reaches it: lower the first"
        )


def _sandboxes(spec: Sections) -> None:
    if spec.resources.sandboxes is not None and not spec.runs_code:
        raise ValueError(
            "resources.sandboxes has no effect while no reward component and no tool runs code: leave it out, or add a "
            "component of kind code, or of kind verl_default with runs_code, to reward.components, or a tool of kind "
            "code_interpreter to rollout.episodes.tools"
        )


def _prompts(spec: Sections) -> None:
    wanted, room = spec.data.max_prompt_tokens, spec.room_for_a_prompt
    if wanted is not None and wanted > room:
        raise ValueError(
            f"data.max_prompt_tokens {wanted} is more than the {room} that rollout.engine.context_tokens "
            f"{spec.rollout.engine.context_tokens} leaves beside max_new_tokens of rollout.sampling (or of "
            "evaluation): lower the first or raise the second"
        )


def _held_out_sets(spec: Sections) -> None:
    for number, each in enumerate((spec.evaluation and spec.evaluation.sets) or ()):
        check_data_source_column(each, f"evaluation.sets.{number}", spec.data)


def _rows(spec: Sections) -> None:
    if spec.data.images is not None:
        check_images(spec.rollout, spec.algorithm, spec.asynchrony, finished=spec.finished_job is not None)
    if spec.data.curriculum is not None and (spec.finished_job is not None or spec.data.holds_groups):
        raise ValueError("data.curriculum needs answers that are graded now, and these are there already: leave it out")


def _contents(spec: Sections) -> None:
    config, algorithm = spec.checkpoint, spec.algorithm
    of_each = {name: getattr(config, name) for name in ("contents", "final_contents", "load_contents")}
    for name in (name for name, parts in of_each.items() if parts is not None and "extra" not in parts):
        if algorithm.old_log_probs == "recompute_at_version":
            raise ValueError(
                f"checkpoint.{name} leaves out extra, the weights of earlier versions, which algorithm.old_log_probs "
                "recompute_at_version goes on with: add extra, or choose recompute"
            )
    if spec.optimisation.average_decay is not None and "extra" not in (
        *config.contents,
        *(config.final_contents or ()),
    ):
        raise ValueError(
            "optimisation.average_decay has no effect while checkpoint.contents leaves out extra, which the average is "
            "part of: add extra there or to final_contents, or remove average_decay"
        )


def _agents(spec: Sections) -> None:
    rewarded = [number for number, each in enumerate(spec.reward.components) if isinstance(each, AgentRewardConfig)]
    if spec.rollout.agents is None:
        if rewarded:
            raise ValueError(
                f"reward.components.{rewarded[0]} is of kind agent, and rollout.agents is null, so that no agent "
                "gives a reward: set rollout.agents (an empty section will do), or remove the component"
            )
        return
    if spec.rollout.agents.environment is not None and not rewarded:
        raise ValueError(
            "rollout.agents.environment gives rewards, and reward.components has none of kind agent that takes them: "
            "add {kind: agent} there"
        )
    if isinstance(spec.algorithm.advantage, RemaxConfig) and spec.finished_job is None:
        raise ValueError(
            "algorithm.advantage.kind remax compares with a greedy answer to each task, and rollout.agents lets agents "
            "drive the episodes, so none is available: choose rloo or reinforce_plus_plus, which need none"
        )
