"""ROLL's reward workers: a Flotilla component for the tags of each domain."""

import re
from collections.abc import Mapping
from typing import Any, Final

from flotilla.importers.parameter import Parameter, Verdict, translated, unsupported
from flotilla.importers.roll import boxes, environments
from flotilla.importers.roll.filtering import group_filter
from flotilla.importers.roll.learning import response_length
from flotilla.importers.source import Source
from flotilla.importers.spelling import is_private_host
from flotilla.importers.values import number, same, text

Fields = dict[str, Any]

TEMPLATES: Mapping[str, Fields] = {"native": {}, "qwen2_5": {}, "qwen3": {"enable_thinking": True}}
"""Variables that ROLL gives to a tokenizer's own template, by the name of the template."""
GRADERS: Mapping[str, Fields] = {
    "MathRuleRewardWorker": {"kind": "math"},
    "CodeSandboxRewardWorker": {"kind": "code", "reward": "all"},
    "GeneralRuleRewardWorker": {"kind": "ifeval", "repetition_penalty": 0.5},
    "CrossThinkQARuleRewardWorker": {"kind": "choice", "letters": "ABCDEFGHIJ"},
}
"""Reward workers of ROLL that are ours under another name."""
JUDGE: Final = "LLMJudgeRewardWorker"
JUDGE_TEMPLATE = """\
Question:
{prompt}

Reference answer:
{label}

Answer:
{response}

Does the answer agree with the reference answer? Reply YES or NO."""
RLVR_TEMPLATE = """
Given a problem, determine whether the final answer in the provided (incomplete) solution process matches the reference answer.  
The reference answer may be one single option character (e.g., A, B, C, D), a numerical value, an expression, or a list of answers if multiple questions are involved.  
**The reference answer may be in Chinese or another language, but your evaluation should be language-agnostic.**  

Your task:  
- Compare the final output of the solution process with the reference answer.  
- If they **match exactly**, output **YES**.  
- If they **do not match**, output **NO**.  
- If the solution process is unclear, incomplete, or ambiguous, assume it is incorrect and output **NO**.  

Your output must be strictly **'YES'** or **'NO'**, with no additional words, punctuation, or explanation.  

---

**Question:**  
{prompt}  

**Solution Process (Final Step Only):**  
{response}  

**Reference Answer:**  
{label}  

**Output:**  
"""  # noqa: E501, W291
QUESTIONS: Mapping[str, str] = {"None": JUDGE_TEMPLATE, "Qwen2.5-7B-Instruct-RLVR-prompt": RLVR_TEMPLATE}
"""What a judge is asked, by ``judge_prompt``; ROLL's own is the prompt that its judge was trained on (Apache-2.0)."""
READING: Fields = {"pattern": r"(?is)\A.*?(yes|\Z)", "verdicts": {"yes": 1.0, "": 0.0}}
"""A reply with yes in it is worth 1, any other 0."""
DTYPES: Mapping[str, str] = {"bf16": "bfloat16", "fp32": "float32"}
SAMPLING: Mapping[str, float] = {"temperature": 0.95, "top_p": 0.7, "top_k": 50, "max_new_tokens": 8192}
"""ROLL's own, of the replies of a judge that it runs."""
ONE: Final = ("num_beams", "num_return_sequences", "repetition_penalty")
ROOM: Final = 1024
"""Tokens of a question beside prompt and answer."""
OPTIONS = frozenset(
    {"worker_cls", "tag_included", "judge_model_type", "judge_model_name", "judge_api_url", "judge_api_key",
     "judge_prompt"}
)  # fmt: skip
"""What of a domain is read."""
SILENT = {"reward_type": "soft", "response_length_penalty_coef": 0.0}
"""Options of ROLL's workers that ask for nothing as long as they have these values."""
DOMAIN = re.compile(r"^rewards\.(\w+)\.(.+)$")
OF_A_JUDGE = frozenset({"model_args", "data_args", "generating_args"})
"""Sections that a judge reads which ROLL runs itself; they say nothing of other workers."""
RUN_BY_ROLL = ("inference", "cluster")
"""Kinds of judges that ROLL runs: in each reward worker, or in engines of their own, which are asked by all."""
SERVED = "reward_model.model_args.model_name_or_path"
ASKED = {
    "rewards.judged.worker_cls": JUDGE,
    "rewards.judged.judge_model_type": "cluster",
    "rewards.judged.model_args.model_name_or_path": "a-judge",
}
PLACED = frozenset({"device_mapping", "world_size", "num_gpus_per_worker", "infer_batch_size", "strategy_args",
                    "use_local", *OF_A_JUDGE})  # fmt: skip
"""What of a domain's worker only says where and how it runs."""
RUNS = "where and how a grader runs is the reward services' own matter: a judge is on device cpu until it is set"

ROWS: tuple[Parameter, ...] = (
    Parameter(
        name="rewards",
        verdict=Verdict.TRANSLATED,
        reason="worker_cls MathRuleRewardWorker is kind math, CodeSandboxRewardWorker code, GeneralRuleRewardWorker "
        "ifeval, CrossThinkQARuleRewardWorker choice, LLMJudgeRewardWorker judge behind a URL, or judge_model; "
        "tag_included names its data sources, query_filter_config is reward.group_filter",
        targets=("reward.components",),
        is_tree=True,
    ),
    translated(SERVED, "reward.components", text, "the model of a judge in engines of its own (judge_model_type "
               "cluster)", example="another-judge", default=None, context=ASKED),
    *unsupported(RUNS, "reward_model", is_tree=True),
)  # fmt: skip


def rewards(source: Source) -> Fields:
    """Make one component per domain; environments reward by themselves."""
    if environments.is_agentic(source):
        return {}
    components: list[Fields] = []
    for domain, options in _domains(source).items():
        grader = _grader(source, domain, options)
        if grader is None:
            continue
        tags = options.get("tag_included")
        more = {"data_sources": [str(tag) for tag in tags]} if isinstance(tags, list) and tags else {}
        components.append({"name": domain, **grader, **more})
    if not components:
        source.lack(
            "reward.components: no domain under rewards is offered here: --set 'reward.components=[{kind: math}]'"
        )
        return {}
    return {"reward.components": components, **group_filter(source)}


def _domains(source: Source) -> dict[str, Fields]:
    """Return what is written of each domain, by option; what is not read of it is named."""
    written = source.trees.get("rewards", {})
    found: dict[str, Fields] = {}
    judges: set[str] = set()
    for spelling, value in written.items():
        match = DOMAIN.match(spelling)
        domain, option = (match[1], match[2]) if match else ("", "")
        found.setdefault(domain, {})[option] = value
        if option == "judge_model_type" and value in RUN_BY_ROLL:
            judges.add(domain)
    for spelling, value in written.items():
        match = DOMAIN.match(spelling)
        domain, option = (match[1], match[2]) if match else ("", "")
        section = option.partition(".")[0]
        if option in OPTIONS or section == "query_filter_config" or (section in OF_A_JUDGE and domain in judges):
            continue
        if option in SILENT and value in {None, SILENT[option]}:
            source.put_aside(spelling, "asks for nothing")
        elif section in PLACED:
            source.put_aside(spelling, RUNS)
        else:
            source.refuse_written(
                spelling, "of a domain only worker_cls, tag_included, query_filter_config and a judge's are offered"
            )
    return {domain: options for domain, options in found.items() if set(options) & OPTIONS}


def _grader(source: Source, domain: str, options: Mapping[str, Any]) -> Fields | None:
    kind = str(options.get("worker_cls", "")).rpartition(".")[2]
    if kind in GRADERS:
        return dict(GRADERS[kind])
    if kind == boxes.WORKER:
        return _boxes(source, domain)
    if kind != JUDGE:
        images = " (it needs videos)" if "Video" in kind else ""
        known = ", ".join(sorted([*GRADERS, JUDGE, boxes.WORKER]))
        offered = f"{kind or 'none'} is not offered{images}: use {known}, or --set"
        source.refuse_written(f"rewards.{domain}.worker_cls", offered)
        return None
    question = QUESTIONS.get(str(options.get("judge_prompt")))
    if question is None:
        source.refuse_written(f"rewards.{domain}.judge_prompt", f"is not known here: use {list(QUESTIONS)[-1]}, or "
                              "write the question as template of the judge")  # fmt: skip
        return None
    asked = {"template": question, **READING}
    if options.get("judge_model_type") in RUN_BY_ROLL:
        return _own_judge(source, domain, options, asked)
    return _judge_behind_a_url(source, domain, options, asked)


def _boxes(source: Source, domain: str) -> Fields | None:
    """Make the grader of boxes, where it can be told what ROLL's is told."""
    if boxes.IN_PIXELS.search(str(source.value("pretrain") or "")):
        source.refuse_written(f"rewards.{domain}.worker_cls", boxes.NOT_TOLD)
        return None
    variable = f"system_envs.{boxes.THRESHOLD}"
    if variable in source.trees.get("system_envs", {}):
        source.refuse_written(variable, "boxes are compared at the average of ROLL's thresholds: leave it out")
    source.files[boxes.FILE] = boxes.TEXT
    return boxes.component()


def _own_judge(source: Source, domain: str, options: Mapping[str, Any], asked: Fields) -> Fields | None:
    """Make the judge that the reward service runs, as a worker of ROLL's does."""
    prefix, path = f"rewards.{domain}", options.get("model_args.model_name_or_path")
    if options.get("judge_model_type") == "cluster":
        path = source.value(SERVED) or path
    for option in options:
        name = option.removeprefix("generating_args.")
        if name in ONE and not same(options[option], 1):
            source.refuse_written(f"{prefix}.{option}", "a judge gives one reply, as it samples it: leave it at 1")
        elif option.startswith("generating_args.") and name not in {*ONE, *SAMPLING}:
            source.refuse_written(f"{prefix}.{option}", f"of a judge's sampling {', '.join(SAMPLING)} are offered")
    dtype = DTYPES.get(str(options.get("model_args.dtype", "bf16")))
    template = TEMPLATES.get(str(options.get("data_args.template", "native")))
    if not isinstance(path, str) or dtype is None or template is None:
        needs = f"a model_name_or_path, a dtype that is bf16 or fp32, and a template of {', '.join(TEMPLATES)}"
        source.refuse_written(f"{prefix}.judge_model_type", f"a judge needs {needs}")
        return None
    given = {name: number(f"{prefix}.generating_args.{name}", options.get(f"generating_args.{name}", default))
             for name, default in SAMPLING.items()}  # fmt: skip
    sampling = {name: SAMPLING[name] if value is None else value for name, value in given.items()}
    most = int(sampling["max_new_tokens"])
    chosen = {"temperature": sampling["temperature"]}
    if sampling["temperature"]:
        chosen |= {"top_p": sampling["top_p"], "top_k": max(int(sampling["top_k"]), 0)}
    return {
        "kind": "judge_model",
        "path": path,
        "dtype": dtype,
        **asked,
        **({"chat_template_options": template} if template else {}),
        **chosen,
        "max_new_tokens": most,
        "max_tokens": int(source.required("prompt_length")) + response_length(source) + ROOM,
    }


def _judge_behind_a_url(source: Source, domain: str, options: Mapping[str, Any], asked: Fields) -> Fields | None:
    prefix = f"rewards.{domain}"
    url, model = options.get("judge_api_url"), options.get("judge_model_name")
    if options.get("judge_model_type") != "api" or not isinstance(url, str) or not isinstance(model, str):
        source.refuse_written(
            f"{prefix}.judge_model_type",
            "a judge is run by the reward service (inference), or asked behind a URL: serve the model with any "
            "OpenAI-compatible server, and give judge_model_type api, judge_api_url (its base URL) and "
            "judge_model_name",
        )
        return None
    if options.get("judge_api_key"):
        source.refuse_written(f"{prefix}.judge_api_key", "a key is no part of a spec: set api_key_env of the judge")
    return {"kind": "judge", "url": url, "model": model, **asked, "allow_private": is_private_host(url)}
