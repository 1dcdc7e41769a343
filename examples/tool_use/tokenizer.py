"""The tokenizer of the arithmetic example, with the tags of tool calls, and a template that shows tools: Hermes."""

from collections.abc import Iterable

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from examples.arithmetic import tokenizer as arithmetic

OPEN, CLOSE = "<tool_call>", "</tool_call>"

CHAT_TEMPLATE = (
    "{%- if tools -%}{{ '<|im_start|>system\\n<tools>\\n' }}"
    "{%- for tool in tools -%}{{ tool | tojson + '\\n' }}{%- endfor -%}"
    "{{ '</tools><|im_end|>\\n' }}{%- endif -%}"
) + arithmetic.CHAT_TEMPLATE


def build_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer on prompts, schemas, calls and answers."""
    tokenizer = arithmetic.build_tokenizer(texts, vocab_size)
    # As in Qwen: tokens of their own that decoding keeps.
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in (OPEN, CLOSE)])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
