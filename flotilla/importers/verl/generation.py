"""verl's programs that answer problems without training (``main_generation``, ``main_generation_server``) as systems.

They write answers to a file; here a job of kind ``evaluation`` answers, grades by verl's own scorers, and keeps them.
Where a script scores them besides, by ``main_eval``, the same job grades by that program's function.
"""

from collections.abc import Callable
from typing import Any

from flotilla.importers.datasets import FILES, held_out
from flotilla.importers.parameter import Parameter, applied, ignored, refused, translated, unsupported
from flotilla.importers.source import Source, System, make_system
from flotilla.importers.spelling import dtype_of
from flotilla.importers.values import count, integer, number, text, texts
from flotilla.importers.verl.actor import REMOTE_CODE
from flotilla.importers.verl.algorithm import REWARD_ROWS
from flotilla.importers.verl.rewards import function_or_default
from flotilla.shared.config.sections.data import is_data_file

Fields = dict[str, Any]

DEADLINE_SECONDS = 7 * 86_400.0
"""verl's programs wait without end."""
PLACED = "where and how fast answers are sampled is the fleet's own matter: this changes speed, not what is sampled"
SPEED = (
    "name", "mode", "tensor_model_parallel_size", "gpu_memory_utilization", "load_format", "enforce_eager",
    "free_cache_engine", "max_num_batched_tokens", "max_num_seqs", "log_prob_micro_batch_size",
    "log_prob_micro_batch_size_per_gpu", "disable_log_stats", "enable_chunked_prefill", "data_parallel_size",
)  # fmt: skip
ONLY_IN_TRAINING = "only read by a trainer"


def _common(model: str, rollout: str) -> tuple[Parameter, ...]:
    """Make the rows that both programs have, by the sections of model and sampling."""
    return (
        *ignored("the program is the job: job.kind", "python -m"),
        applied(f"{model}.path", "model.path", text, "a directory, or a name on the hub", example="other",
                default="~/models/Qwen2-7B-Instruct"),
        refused(f"{model}.external_lib", "no module is imported for the model: use one that transformers has",
                default=None),
        *unsupported(REMOTE_CODE, f"{model}.trust_remote_code", "data.trust_remote_code"),
        applied("data.prompt_key", "data.prompt_column", text, "column with the chat messages", example="messages",
                default="prompt"),
        *ignored("answers are kept with the experiment, in parquet files of its samples: flotilla show",
                 "data.output_path"),
        translated(f"{rollout}.temperature", "evaluation.temperature", number, "softmax temperature; 0 is greedy",
                   example=0.5, default=1.0),
        translated(f"{rollout}.dtype", "model.dtype", text, "element type", example="float32", default="bfloat16"),
        refused(f"{rollout}.do_sample", "give temperature 0 for greedy answers", default=True),
        refused(f"{rollout}.use_fire_sampling", "the first token is sampled as all are", default=False),
        refused(f"{rollout}.ignore_eos", "an answer ends with its end of sequence", default=False),
        *unsupported(PLACED, "trainer.nnodes", "trainer.n_gpus_per_node", "data.batch_size",
                     *(f"{rollout}.{name}" for name in SPEED), harmless=(1,)),
        *(row for row in REWARD_ROWS if row.name.startswith("custom_reward_function.")),
        *ignored("there is no Ray here", "ray_init", "ray_kwargs", is_tree=True),
    )  # fmt: skip


def _lengths(rollout: str, prompt: int, response: int) -> tuple[Parameter, ...]:
    return (
        translated(f"{rollout}.prompt_length", ("data.max_prompt_tokens", "rollout.engine.context_tokens"), count,
                   "longest prompt; with the response length the engine's context", example=256, default=prompt),
        translated(f"{rollout}.response_length", "rollout.sampling.max_new_tokens", count, "most tokens of an answer",
                   example=256, default=response),
    )  # fmt: skip


ROWS: tuple[Parameter, ...] = (
    *_common("model", "rollout"),
    *_lengths("rollout", 1536, 512),
    translated("data.path", "evaluation.path", text, "file with the problems", example="other.parquet",
               default="~/data/rlhf/math/test.parquet"),
    translated("data.n_samples", "evaluation.group_size", count, "answers to each", example=3, default=5),
    translated("rollout.top_k", "evaluation.top_k", integer, "-1 and 0 are all tokens", example=20, default=50),
    applied("rollout.top_p", "evaluation.top_p", number, "smallest set of tokens of this probability", example=0.9,
            default=0.7, context={}),
    *ignored("data.n_samples is read instead", "rollout.n"),
    *ignored(ONLY_IN_TRAINING, "actor", is_tree=True),
)  # fmt: skip

SERVER = "actor_rollout_ref.rollout"
SERVER_ROWS: tuple[Parameter, ...] = (
    *_common("actor_rollout_ref.model", SERVER),
    *_lengths(SERVER, 512, 512),
    translated("data.train_files", ("evaluation.path", "evaluation.sets"), texts, "files with the problems",
               example=["a.parquet", "b.parquet"], default=["~/data/rlhf/gsm8k/train.parquet"]),
    translated(f"{SERVER}.n", "evaluation.group_size", count, "answers to each", example=3, default=1),
    applied(f"{SERVER}.top_p", "evaluation.top_p", number, "smallest set of tokens of this probability", example=0.9,
            default=1.0, context={}),
    *ignored("the program does not read it: all tokens are sampled from", f"{SERVER}.top_k"),
)  # fmt: skip


def _answering(rollout: str, files: str, samples: str) -> Callable[[Source], Fields]:
    """Make the rule of a program.

    Args:
        rollout: the section of sampling.
        files: name of the parameter with the problems.
        samples: of that with the number of answers.
    """

    def rule(source: Source) -> Fields:
        found = source.required(files)
        paths = [found] if isinstance(found, str) else found
        if not paths or not all(is_data_file(path) for path in paths):
            source.refuse(files, f"must be {FILES}")
        prompt, answer = source.required(f"{rollout}.prompt_length"), source.required(f"{rollout}.response_length")
        fields: Fields = {
            "name": "generation",
            "job.kind": "evaluation",
            "model.dtype": dtype_of(source, f"{rollout}.dtype"),
            "data.label_column": "reward_model.ground_truth",
            "data.data_source_column": "data_source",
            "data.max_prompt_tokens": prompt,
            "rollout.engine.context_tokens": prompt + answer,
            "rollout.sampling.max_new_tokens": answer,
            "evaluation.group_size": source.required(samples),
            "evaluation.deadline_seconds": DEADLINE_SECONDS,
            **held_out([{"path": path} for path in paths]),
        }
        temperature = source.required(f"{rollout}.temperature")
        if not temperature:
            return fields
        fields |= {"evaluation.greedy": False, "evaluation.temperature": temperature}
        fields["evaluation.top_p"] = source.required(f"{rollout}.top_p")
        top_k = f"{rollout}.top_k"
        fields["evaluation.top_k"] = max(source.value(top_k) or 0, 0) if top_k == "rollout.top_k" else 0
        return fields

    return rule


VERL_GENERATION: System = make_system(
    "verl main_generation", (ROWS,), rules=(_answering("rollout", "data.path", "data.n_samples"), function_or_default)
)
VERL_GENERATION_SERVER: System = make_system(
    "verl main_generation_server",
    (SERVER_ROWS,),
    rules=(_answering(SERVER, "data.train_files", f"{SERVER}.n"), function_or_default),
)
OF_PROGRAM = {"main_generation": VERL_GENERATION, "main_generation_server": VERL_GENERATION_SERVER}
