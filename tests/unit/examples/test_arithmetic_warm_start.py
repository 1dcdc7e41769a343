"""What the warm start trains on, and that it measures the model it has."""

import random

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.arithmetic.building import final_answer
from examples.arithmetic.model import build_model
from examples.arithmetic.problems import terse_answer, training_set, worked_solution
from examples.arithmetic.settings import ModelSettings, ProblemSettings, WarmStartSettings
from examples.arithmetic.tokenizer import TURN_END, build_tokenizer, completion_ids, prompt_ids
from examples.arithmetic.warm_start import PassRate, Probe, WarmStart, collate, completion_logits, probabilities

PROBLEMS = training_set(60, ProblemSettings(), random.Random(0))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer([text for p in PROBLEMS for text in (p.prompt, worked_solution(p))], 400)


def test_the_tokenizer_keeps_digits_apart_and_loses_no_text(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "47+8=55; 55-5=50 #### 50 naïve 日本"

    ids = tokenizer(text)["input_ids"]

    assert tokenizer.decode(ids) == text
    assert all(sum(character.isdigit() for character in tokenizer.decode([token])) <= 1 for token in ids)


def test_a_prompt_is_a_users_turn_and_the_opening_of_the_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = prompt_ids(tokenizer, ["Ana has 4 pens."])[0]

    turn = [{"role": "user", "content": "Ana has 4 pens."}]
    rendered = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids == rendered
    assert tokenizer.decode(ids) == "<|im_start|>user\nAna has 4 pens.<|im_end|>\n<|im_start|>assistant\n"


def test_a_completion_ends_with_the_token_that_stops_generation(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = completion_ids(tokenizer, ["#### 50"])[0]

    model = build_model(ModelSettings(), tokenizer, seed=0)
    assert ids.count(tokenizer.eos_token_id) == 1
    assert ids[-1] == tokenizer.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.eos_token == TURN_END
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_only_completions_are_targets() -> None:
    batch = collate([[11, 12, 13], [14]], [[21, 22], [23]], pad_id=0)

    assert batch.input_ids.tolist() == [[11, 12, 13, 21, 22], [14, 23, 0, 0, 0]]
    assert batch.targets.tolist() == [21, 22, 23]
    assert batch.owner.tolist() == [0, 0, 1]


def test_a_completions_probability_is_the_product_of_its_tokens() -> None:
    log_probs = torch.tensor([0.5, 0.5, 0.25]).log()

    assert probabilities(log_probs, torch.tensor([0, 0, 1]), 3).tolist() == pytest.approx([0.25, 0.25, 1.0])


def test_padding_does_not_change_what_a_sequence_is_given(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_model(ModelSettings(), tokenizer, seed=0)
    prompts = prompt_ids(tokenizer, [problem.prompt for problem in PROBLEMS[:4]])
    texts = [worked_solution(PROBLEMS[0])] + [terse_answer(problem.answer) for problem in PROBLEMS[1:4]]
    completions = completion_ids(tokenizer, texts)

    with torch.no_grad():
        together = completion_logits(model, collate(prompts, completions, pad_id=0))
        alone = [
            completion_logits(model, collate([p], [c], pad_id=0)) for p, c in zip(prompts, completions, strict=True)
        ]

    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_what_is_computed_for_targets_alone_is_what_the_whole_model_gives(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_model(ModelSettings(), tokenizer, seed=0)
    prompts = prompt_ids(tokenizer, [problem.prompt for problem in PROBLEMS[:4]])
    batch = collate(
        prompts, completion_ids(tokenizer, [worked_solution(problem) for problem in PROBLEMS[:4]]), pad_id=0
    )

    found, whole = completion_logits(model, batch), model(input_ids=batch.input_ids).logits
    torch.testing.assert_close(found, whole[:, :-1][batch.is_completion], atol=1e-5, rtol=1e-5)
    of_whole = torch.autograd.grad(whole[:, :-1][batch.is_completion].square().mean(), list(model.parameters()))
    for one, other in zip(torch.autograd.grad(found.square().mean(), list(model.parameters())), of_whole, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


class Rated(Probe):
    """Finds the same rate of greedy answers, whatever the model."""

    def __init__(self, greedy: float) -> None:
        self.greedy = greedy
        self.num_measured = 0

    def measure(self, model: Qwen3ForCausalLM) -> PassRate:
        self.num_measured += 1
        return PassRate(sampled=0.5, greedy=self.greedy, worked=0.5)


@pytest.mark.parametrize(("rough", "steps", "greedy", "num_exact"), [(0.9, 4, 0.9, 0), (0.35, 0, 0.25, 1)])
def test_an_exact_probe_decides_near_the_window_and_far_from_it_a_rough_one_will_do(
    tokenizer: PreTrainedTokenizerFast, rough: float, steps: int, greedy: float, num_exact: int
) -> None:
    model, settings = build_model(ModelSettings(num_layers=1), tokenizer, 0), WarmStartSettings(max_weak_steps=4)
    exact = Rated(0.25)

    found = WarmStart(model, tokenizer, ProblemSettings(), settings, 0).learn_to_guess(
        Rated(rough), exact, lambda _: None
    )

    assert (found[0], found[1].greedy, exact.num_measured) == (steps, greedy, num_exact)


def test_equal_seeds_make_equal_models(tokenizer: PreTrainedTokenizerFast) -> None:
    first, second, other = (
        build_model(ModelSettings(num_layers=1), tokenizer, seed).lm_head.weight for seed in (3, 3, 4)
    )

    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_the_final_answer_is_the_last_one_marked() -> None:
    assert final_answer("4+8=12 #### 12") == "12"
    assert final_answer("#### 5 no, #### 7") == "7"
    assert final_answer("12") is None
