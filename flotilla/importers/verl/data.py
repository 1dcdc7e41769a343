"""Rows of verl's ``data`` section."""

from typing import Any

from flotilla.importers.engines import EMBEDDED
from flotilla.importers.parameter import Parameter, Verdict, applied, ignored, refused, translated, unsupported
from flotilla.importers.values import count, flag, integer, number, text, texts
from flotilla.importers.verl.actor import CUTTING
from flotilla.importers.verl.launch import MODULE

TEMPLATE = "data.apply_chat_template_kwargs"


def _limit(value: Any) -> int | None:
    """Read verl's -1 as no limit."""
    return None if value is None or value < 0 else int(value)


KNOWN_SAMPLER = "pkg://tests.utils.dataset.test_create_rl_sampler_on_cpu"
"""The file of verl's own that its example of a curriculum names."""

NO_VIDEOS = "there are no videos: where the rows have none, leave it out, or give null"
NO_SOUND = "there is no sound, only text: where the rows have none, leave it out, or give null"

DATA: tuple[Parameter, ...] = (
    translated("data.train_files", ("data.path", "data.sources"), texts,
               "one file of training rows is the path, several are sources that are joined",
               example=["a.parquet", "b.parquet"], default="~/data/rlhf/gsm8k/train.parquet"),
    translated("data.val_files", ("evaluation.path", "evaluation.sets"), texts,
               "one file of held-out rows is the path, several are sets with series of their own",
               example=["a.parquet", "b.parquet"], default="~/data/rlhf/gsm8k/test.parquet"),
    translated("data.train_max_samples", "data.max_rows", integer,
               "the first rows of the file (verl draws them at random where it shuffles); -1 is all",
               example=100, default=-1, translate=_limit),
    translated("data.val_max_samples", "evaluation.max_rows", integer,
               "the first held-out rows, of one file; -1 is all", example=100, default=-1),
    applied("data.prompt_key", "data.prompt_column", text,
            "column with the chat messages; prompt with data.format verl", example="messages", default="prompt",
            context={}),
    applied("data.reward_fn_key", "data.data_source_column", text,
            "column that says which dataset a row is from; data_source with data.format verl",
            example="origin", default="data_source", context={}),
    translated("data.train_batch_size", ("asynchrony.require_batches",), integer,
               "prompts of one step: ppo_mini_batch_size times require_batches (0 in fully asynchronous training)",
               example=512, default=1024),
    translated("data.gen_batch_size", "optimisation.steps", integer,
               "of the recipe dapo with filter_groups: prompts drawn for a step, by which --rows make the steps; "
               "elsewhere it must be train_batch_size", example=2048, default=None,
               context={MODULE: "recipe.dapo.main_dapo", "algorithm.filter_groups.enable": True,
                        "trainer.total_training_steps": None}),
    translated("data.max_prompt_length", ("data.max_prompt_tokens", "rollout.engine.context_tokens"), count,
               "longest prompt, and with max_response_length the engine's context",
               example=1024, default=512),
    translated("data.max_response_length", ("rollout.sampling.max_new_tokens", "rollout.engine.context_tokens"), count,
               "most tokens of an answer", example=1024, default=512),
    applied("data.shuffle", "data.shuffle", flag, "each epoch in another order", example=False, default=True),
    translated("data.seed", "seed", integer, "seed of the order, and here of every sample", example=7, default=None,
               translate=lambda value: 0 if value is None else value % 2**31),
    translated("data.truncation", "data.overlong", text,
               "left, right and middle cut a longer prompt; at error its task fails, is counted and replaced",
               example="left", default="error"),
    translated("data.filter_overlong_prompts", "data.overlong", flag, "rows with a longer prompt are left out",
               example=True, default=False),
    translated("data.filter_overlong_prompts_workers", "data.overlong", count, "processes that count tokens",
               example=4, default=1, context={"data.filter_overlong_prompts": True}),
    Parameter(name=TEMPLATE, verdict=Verdict.TRANSLATED, reason="variables of the chat template, such as "
              "enable_thinking", targets=("data.chat_template_options",), is_tree=True),
    translated("data.custom_cls.path", "data.sources", text,
               "the class is called as verl does, by a file that is written beside the spec; its rows are read once",
               example="rows.py", default=None, context={"data.custom_cls.name": "Rows"}),
    translated("data.custom_cls.name", "data.sources", text, "the class in data.custom_cls.path", example="Others",
               default=None, context={"data.custom_cls.path": "rows.py", "data.custom_cls.name": "Rows"}),
    refused("data.tokenizer", "the tokenizer is that of model.path: put the other one into that directory",
            default=None),
    refused("data.video_key", NO_VIDEOS, default=None, is_judged=True),
    refused("data.audio_key", NO_SOUND, default=None, is_judged=True),
    translated("data.sampler.class_name", "data.shuffle", text, "of verl's own RandomCurriculumSampler, which draws in "
               "random order and learns nothing; others are refused", example="RandomCurriculumSampler",
               default=None, context={"data.shuffle": False, "data.sampler.class_path": KNOWN_SAMPLER}),
    translated("data.sampler.class_path", "data.shuffle", text, "the file of the class", example=KNOWN_SAMPLER,
               default=None, context={"data.shuffle": False, "data.sampler.class_name": "RandomCurriculumSampler",
                                      "data.sampler.class_path": None}),
    refused("data.sampler", "rows are drawn in order or shuffled: prepare the file instead", is_tree=True),
    *ignored("an evaluation issues all its rows at once", "data.val_batch_size"),
    *ignored("the order of held-out rows does not change their mean", "data.validation_shuffle"),
    *ignored("how rows are loaded does not change them", "data.use_shm", "data.dataloader_num_workers"),
    *ignored("tasks always carry the chat messages, and nothing else of these is read",
             "data.return_raw_input_ids", "data.return_raw_chat", "data.return_full_prompt"),
)  # fmt: skip

ROLLOUT_NAME = "actor_rollout_ref.rollout"
ENGINE = EMBEDDED
SINGLE = "an import makes single turns, without tools or a simulated user: leave it out"
TOOLS = (
    "an import makes single turns; verl's tools are classes with arguments of each row: leave it out, and give --set "
    "'rollout.episodes={kind: tools, tools: [...]}' with functions, URLs or MCP servers"
)
USERS = (
    "an import makes single turns; verl's interactions are classes of the user's: leave it out, and give --set "
    '\'rollout.episodes={kind: environment, environments: [{environment: "user:http://HOST:PORT/v1", '
    "options: {model: ...}}]}' for a user whom a model plays"
)
TURNS: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    ("function_tool_path", None, ()), ("interaction_config_path", None, ()),
    ("completion_callback", None, ()), ("num_repeat_rollouts", None, ()),
    ("tool_response_truncate_side", "middle", (None,)), ("use_inference_chat_template", False, (None,)),
)  # fmt: skip
"""Options of turns and tools, verl's defaults, and other values that ask for nothing. The default agent loop may read
them although ``enable`` is false, since each row can name another one."""
VALIDATED_BY_SAMPLES = {f"{ROLLOUT_NAME}.val_kwargs.do_sample": True, f"{ROLLOUT_NAME}.val_kwargs.temperature": 1.0}

ROLLOUT: tuple[Parameter, ...] = (
    translated(f"{ROLLOUT_NAME}.temperature", "rollout.sampling.temperature", number,
               "softmax temperature, by which the trainer divides its logits, too", example=0.7, default=1.0,
               translate=lambda value: value),
    translated(f"{ROLLOUT_NAME}.top_k", "rollout.sampling.top_k", integer, "-1, all tokens, is 0 here",
               example=50, default=-1, translate=lambda value: max(value or 0, 0)),
    applied(f"{ROLLOUT_NAME}.top_p", "rollout.sampling.top_p", number, "smallest set of tokens of this probability",
            example=0.9, default=1.0),
    translated(f"{ROLLOUT_NAME}.n", "rollout.group_size", count,
               "trajectories per prompt", example=8, default=1),
    applied(f"{ROLLOUT_NAME}.ignore_eos", "rollout.sampling.ignore_eos", flag, "go on after the end of sequence",
            example=True, default=False),
    translated(f"{ROLLOUT_NAME}.prompt_length", ("data.max_prompt_tokens", "rollout.engine.context_tokens"), count,
               "longest prompt; with the response length the engine's context; by itself data.max_prompt_length",
               example=256),
    translated(f"{ROLLOUT_NAME}.response_length", "rollout.sampling.max_new_tokens", count,
               "most tokens of an answer; by itself data.max_response_length", example=256),
    translated(f"{ROLLOUT_NAME}.max_model_len", "rollout.engine.context_tokens", count,
               "a bound below prompt and response together lowers the context", example=700, default=None),
    translated(f"{ROLLOUT_NAME}.max_num_seqs", "rollout.engine.slots", count,
               "completions sampled at a time; where it is silent, our own default: it is a capacity",
               example=64, translate=lambda value: value),
    translated(f"{ROLLOUT_NAME}.dtype", "model.dtype", text,
               "element type in sampling and training, over float32 masters; float16 is float32",
               example="float32", default="bfloat16"),
    translated(f"{ROLLOUT_NAME}.val_kwargs.do_sample", "evaluation.greedy", flag, "false is greedy", example=True,
               default=False, context={f"{ROLLOUT_NAME}.val_kwargs.temperature": 1.0},
               aliases=(f"{ROLLOUT_NAME}.val_kwargs.*",)),
    translated(f"{ROLLOUT_NAME}.val_kwargs.temperature", ("evaluation.temperature", "evaluation.greedy"), number,
               "softmax temperature; 0 is greedy", example=0.6, default=0,
               context={f"{ROLLOUT_NAME}.val_kwargs.do_sample": True}),
    applied(f"{ROLLOUT_NAME}.val_kwargs.n", "evaluation.group_size", count, "answers per held-out prompt",
            example=4, default=1, context=VALIDATED_BY_SAMPLES),
    translated(f"{ROLLOUT_NAME}.val_kwargs.top_k", "evaluation.top_k", integer, "-1, all tokens, is 0 here",
               example=20, default=-1, context=VALIDATED_BY_SAMPLES),
    applied(f"{ROLLOUT_NAME}.val_kwargs.top_p", "evaluation.top_p", number,
            "smallest set of tokens of this probability", example=0.9, default=1.0, context=VALIDATED_BY_SAMPLES),
    refused(f"{ROLLOUT_NAME}.val_kwargs", "of the evaluation's sampling n, do_sample, temperature, top_k and top_p "
            "are offered", default={}, is_tree=True),
    refused(f"{ROLLOUT_NAME}.do_sample", "greedy answers are no policy to train: leave it true", default=True),
    refused(f"{ROLLOUT_NAME}.over_sample_rate", "answers that take longest would be left out: leave it 0", default=0),
    refused(f"{ROLLOUT_NAME}.use_fire_sampling", "a hotter first token would not be the policy's: leave it false",
            default=False),
    *(refused(f"{ROLLOUT_NAME}.multi_turn.{name}",
              TOOLS if name.endswith("tool_path") else USERS if name.startswith("interaction") else SINGLE,
              default=default, harmless=harmless)
      for name, default, harmless in TURNS),
    *ignored("an episode's tokens are those that were sampled: there is no second tokenisation to compare",
             f"{ROLLOUT_NAME}.multi_turn.tokenization_sanity_check_mode",
             f"{ROLLOUT_NAME}.multi_turn.enable_tokenization_sanity_check"),
    refused(f"{ROLLOUT_NAME}.multi_turn", SINGLE, default=None, harmless=({},), is_tree=True),
    refused(f"{ROLLOUT_NAME}.agent.custom_async_server.path", "the engine is the fleet's own: leave it null",
            default=None),
    refused(f"{ROLLOUT_NAME}.agent.default_agent_loop", "episodes are single turns: use single_turn_agent",
            default="single_turn_agent", harmless=("tool_agent",)),
    refused(f"{ROLLOUT_NAME}.agent", SINGLE, default=None, harmless=({},), is_tree=True),
    applied(f"{ROLLOUT_NAME}.repetition_penalty", "rollout.sampling.repetition_penalty", number,
            "of tokens that prompt or completion have; log-probabilities stay the policy's own", example=1.1,
            default=1.0),
    *ignored("only names what agent.custom_async_server.path, which is refused, would load",
             f"{ROLLOUT_NAME}.agent.custom_async_server.name"),
    *ignored("the sampler's log-probabilities are always recorded", f"{ROLLOUT_NAME}.calculate_log_probs"),
    *unsupported("trajectories are kept with the experiment, and sent to no tracer", f"{ROLLOUT_NAME}.trace",
                 is_tree=True),
    *unsupported(ENGINE,
             f"{ROLLOUT_NAME}.name", f"{ROLLOUT_NAME}.gpu_memory_utilization",
             f"{ROLLOUT_NAME}.free_cache_engine", f"{ROLLOUT_NAME}.load_format", f"{ROLLOUT_NAME}.enforce_eager",
             f"{ROLLOUT_NAME}.max_num_batched_tokens", f"{ROLLOUT_NAME}.enable_chunked_prefill",
             f"{ROLLOUT_NAME}.enable_prefix_caching", f"{ROLLOUT_NAME}.disable_log_stats",
             f"{ROLLOUT_NAME}.enable_sleep_mode", f"{ROLLOUT_NAME}.layered_summon",
             f"{ROLLOUT_NAME}.multi_stage_wake_up", f"{ROLLOUT_NAME}.cudagraph_capture_sizes",
             f"{ROLLOUT_NAME}.agent.num_workers"),
    *unsupported(ENGINE, f"{ROLLOUT_NAME}.mode", default="async"),
    *unsupported(ENGINE, f"{ROLLOUT_NAME}.data_parallel_size", f"{ROLLOUT_NAME}.pipeline_model_parallel_size",
                 f"{ROLLOUT_NAME}.expert_parallel_size", f"{ROLLOUT_NAME}.moe_tensor_parallel_size", default=1),
    refused(f"{ROLLOUT_NAME}.chat_scheduler", "a class of the user's says what is asked: leave it out", default=None,
            harmless=("examples.ppo_trainer.naive_chat_scheduler.NaiveChatCompletionScheduler",)),
    *unsupported(ENGINE,
             f"{ROLLOUT_NAME}.engine_kwargs", f"{ROLLOUT_NAME}.engine_kwargs.vllm",
             f"{ROLLOUT_NAME}.engine_kwargs.sglang", is_tree=True),
    *unsupported(ENGINE,
             f"{ROLLOUT_NAME}.engine_kwargs.sglang.attention_backend"),
    *unsupported(CUTTING,
             f"{ROLLOUT_NAME}.log_prob_micro_batch_size", f"{ROLLOUT_NAME}.log_prob_micro_batch_size_per_gpu",
             f"{ROLLOUT_NAME}.log_prob_use_dynamic_bsz", f"{ROLLOUT_NAME}.log_prob_max_token_len_per_gpu"),
)  # fmt: skip
