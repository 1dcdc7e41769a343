"""A byte-level BPE tokenizer trained on the problems themselves: digits stay single, turns are ChatML."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

PAD, TURN_START, TURN_END = "<|pad|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def build_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer.

    Args:
        texts: prompts and completions as they will be met, without special tokens.
        vocab_size: upper bound; the result is smaller when the texts run out of pairs to merge.

    Returns:
        A tokenizer with the chat template, ``<|im_end|>`` as its end of sequence and ``<|pad|>`` for padding.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    roles = ["system\n", "user\n", "assistant\n", "tool\n"] * 2
    tokenizer.train_from_iterator([*roles, *texts], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def prompt_ids(tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> list[list[int]]:
    """Encode each text as a user's turn followed by the opening of the assistant's, as a rollout will."""
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids: list[list[int]] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return ids


def completion_ids(tokenizer: PreTrainedTokenizerFast, completions: list[str]) -> list[list[int]]:
    """Encode what the assistant says, with the token that ends its turn."""
    ended = [completion + TURN_END for completion in completions]
    ids: list[list[int]] = tokenizer(ended, add_special_tokens=False)["input_ids"]
    return ids
