"""A tokenizer of bytes and of the answers that the rows of a trial expect, each answer one token."""

from collections.abc import Iterable, Sequence
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
IMAGE: Final = "<|image_pad|>"
VISION: Final = ("<|vision_start|>", "<|vision_end|>", IMAGE, "<|video_pad|>")
VOCABULARY: Final = 1024
"""Tokens at most, beside those of answers."""
TEMPLATE: Final = (
    "{%- if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}"
    "<|im_end|>\n{% endif -%}"
    "{%- for message in messages -%}<|im_start|>{{ message.role + '\\n' }}"
    "{%- if message.content is string %}{{ message.content }}"
    "{%- elif message.content %}{% for part in message.content %}"
    "{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif -%}"
    "{% endfor %}{% endif -%}"
    "{%- for call in message.tool_calls or [] %}\n<tool_call>\n{{ (call.function or call) | tojson }}\n</tool_call>"
    "{% endfor -%}"
    "<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)
"""ChatML, with tools and images."""


def make_tokenizer(texts: Iterable[str], answers: Sequence[str], max_tokens: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer on the texts that will be met.

    Args:
        texts: prompts and what the fleet puts around them.
        answers: texts that become one token each.
        max_tokens: longest sequence that its model takes.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [PAD, TURN_START, TURN_END, *VISION]
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(answer, normalized=False) for answer in dict.fromkeys(answers)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START, *VISION],
        chat_template=TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=max_tokens,
    )
