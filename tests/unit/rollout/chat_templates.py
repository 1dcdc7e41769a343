"""Tokenizers with the chat templates that models have, small, and made here: nothing is downloaded."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
)
CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
LLAMA_3 = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{- message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
QWEN_3 = """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "user" or message.role == "system" %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""  # noqa: E501
GEMMA = (
    "{{ bos_token }}{% for message in messages %}" + ALTERNATE + "{% if (message['role'] == 'assistant') %}"
    "{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}" + ALTERNATE + "{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + '[/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)

CORPUS = (
    "You are on a frozen lake. The goal is two cells to the right; go left, then down. user assistant model system",
    "def solve(numbers): return sum(n * n for n in numbers)  # 12, 345 and 6789 make 7146",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. The quick brown fox, again and again!",
    'think about it first, then answer with one word. <answer>Up</answer> {"name": "add", "arguments": {}}',
)


@dataclass(frozen=True)
class Family:
    """A kind of model's chat.

    Attributes:
        template: Jinja.
        special, plain: added tokens; ``plain`` ones are kept when special ones are left out of a text.
        end: the token that ends the assistant's message.
        is_byte_level: how its tokenizer sees spaces.
        between: what stands between two turns as text, written by hand, for an observation.
        lead: what every answer begins with.
    """

    template: str
    special: tuple[str, ...]
    end: str
    is_byte_level: bool
    between: Callable[[str], str]
    plain: tuple[str, ...] = ()
    lead: str = ""
    start: str | None = None


FAMILIES = {
    "chatml": Family(
        CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>", True,
        lambda shown: f"\n<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n",
    ),
    "llama 3": Family(
        LLAMA_3, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>", True,
        lambda shown: "<|start_header_id|>user<|end_header_id|>\n\n" + shown.strip()
        + "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        start="<|begin_of_text|>",
    ),
    "qwen 3": Family(
        QWEN_3, ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), "<|im_end|>", True,
        lambda shown: f"\n<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n",
        plain=("<think>", "</think>"),
    ),
    "gemma": Family(
        GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", False,
        lambda shown: f"\n<start_of_turn>user\n{shown.strip()}<end_of_turn>\n<start_of_turn>model\n", start="<bos>",
    ),
    "mistral": Family(
        MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", False,
        lambda shown: f"[INST] {shown}[/INST]", lead=" ", start="<s>",
    ),
}  # fmt: skip


@lru_cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Train the small tokenizer of a family."""
    family = FAMILIES[name]
    tokenizer = Tokenizer(BPE(byte_fallback=not family.is_byte_level, unk_token=None))
    trainer = BpeTrainer(vocab_size=700, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    if family.is_byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        trainer = BpeTrainer(
            vocab_size=900, show_progress=False, special_tokens=[f"<0x{byte:02X}>" for byte in range(256)]
        )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in family.special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.plain])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=family.start,
        eos_token=family.end,
        chat_template=family.template,
        clean_up_tokenization_spaces=False,
    )
