from flotilla.services.trainer.tiny_models.making import make_tokenizer
from flotilla.shared.models.prompts import PromptTemplate
from flotilla.shared.schemas.task import Message

ANSWERS = ("\n#### 1\n", "<answer>Up</answer>")


def test_a_conversation_begins_as_its_prompt_does() -> None:
    tokenizer = make_tokenizer(["What is it?", "It is 1."], ANSWERS, 512)
    chat = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is 1."}]

    prompt = PromptTemplate().render(tokenizer, chat[:1])

    assert prompt == "<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n"
    assert PromptTemplate().render(tokenizer, chat, opens=False) == f"{prompt}It is 1.<|im_end|>\n"


def test_an_answer_is_one_token_and_texts_come_back() -> None:
    tokenizer = make_tokenizer(["What is it?"], ANSWERS, 512)

    for text in ("ñ 漢 What is it?" + ANSWERS[0], ANSWERS[1]):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert all(len(tokenizer(answer)["input_ids"]) == 1 for answer in ANSWERS)


def test_tools_and_images_have_a_place() -> None:
    tokenizer = make_tokenizer(["x"], (), 512)
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}]

    text = PromptTemplate().render(tokenizer, [{"role": "user", "content": parts}], tools=[{"name": "search"}])

    assert "search" in text
    assert "<|vision_start|><|image_pad|><|vision_end|>What?" in text
    assert PromptTemplate().token_ids(tokenizer, [Message("user", "x")])
