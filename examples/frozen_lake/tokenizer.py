"""A byte-level BPE tokenizer in which every cell of a lake is a token, and every action is one; turns are ChatML."""

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from examples.arithmetic.tokenizer import CHAT_TEMPLATE, PAD, TURN_END, TURN_START
from flotilla.services.rollout.environments.frozen_lake import ACTIONS

from .walks import PROMPT


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer on the few words that there are."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[_OGX√]|P(?=[_OGX√\n]|$)|\n"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=512,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = ["system", "user", "assistant", "tool", *ACTIONS, "√", PROMPT]
    tokenizer.train_from_iterator(words * 4, trainer)
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
