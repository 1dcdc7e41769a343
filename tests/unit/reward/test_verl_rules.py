"""verl's scorers, by a table worked out by hand from its rules: what is answered, what is right, what verl gives."""

import pytest

from flotilla.services.reward.verifiers.registry import Surroundings, build_verifier
from flotilla.services.reward.verifiers.verl import fenced_program, is_formatted_geometry, prime_answer
from flotilla.shared.config.sections.reward import RewardConfig
from tests.unit.reward.builders import a_sample

GSM8K, MATH, DAPO, SEARCH = "openai/gsm8k", "lighteval/MATH", "math_dapo", "searchR1_nq"
FAR = "x" * 300
PARIS = '{"target": ["Paris", "the City of Light"]}'

GOLDENS = [
    # gsm8k: "#### NUMBER", the last one, within the last 300 characters, as text without commas
    (GSM8K, "6 * 7 = 42\n#### 42", "42", 1.0),
    (GSM8K, "#### 41 no, #### 42", "42", 1.0),
    (GSM8K, "#### 42 no, #### 41", "42", 0.0),
    (GSM8K, "#### 1,234", "1234", 1.0),
    (GSM8K, "#### 1,234", "1,234", 0.0),
    (GSM8K, "#### -5", "-5", 1.0),
    (GSM8K, "#### +5", "5", 0.0),
    (GSM8K, "#### 42.", "42", 0.0),
    (GSM8K, "#### 42.0", "42", 0.0),
    (GSM8K, "#### 3.5 miles", "3.5", 1.0),
    (GSM8K, "#### 50%", "50", 1.0),
    (GSM8K, "#### $42", "42", 0.0),
    (GSM8K, "####42", "42", 0.0),
    (GSM8K, "####  42", "42", 0.0),
    (GSM8K, "The answer is 42.", "42", 0.0),
    (GSM8K, "\\boxed{42}", "42", 0.0),
    (GSM8K, "", "42", 0.0),
    (GSM8K, "#### 42" + FAR[:293], "42", 1.0),
    (GSM8K, "#### 42" + FAR[:294], "42", 0.0),
    # MATH: the last box, both sides spelt plainly
    (MATH, "so \\boxed{42}", "42", 1.0),
    (MATH, "\\boxed{41} and \\boxed{42}", "42", 1.0),
    (MATH, "\\boxed{42} and \\boxed{41}", "42", 0.0),
    (MATH, "\\boxed{42}" + FAR, "42", 1.0),
    (MATH, "the answer is 42", "42", 0.0),
    (MATH, "\\boxed{42", "42", 0.0),
    (MATH, "\\fbox{42}", "42", 0.0),
    (MATH, "\\boxed 42$ is it", "42", 1.0),
    (MATH, "$\\boxed 42$ or \\boxed{43}", "43", 0.0),
    (MATH, "\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", 1.0),
    (MATH, "\\boxed{1/2}", "\\frac{1}{2}", 1.0),
    (MATH, "\\boxed{0.5}", "\\frac12", 1.0),
    (MATH, "\\boxed{.5}", "1/2", 1.0),
    (MATH, "\\boxed{0.25}", "\\frac14", 0.0),
    (MATH, "\\boxed{\\dfrac{3}{4}}", "\\tfrac34", 1.0),
    (MATH, "\\boxed{\\frac1{72}}", "\\frac{1}{72}", 1.0),
    (MATH, "\\boxed{x/2}", "\\frac{x}{2}", 0.0),
    (MATH, "\\boxed{02/3}", "\\frac{2}{3}", 0.0),
    (MATH, "\\boxed{50\\%}", "50", 1.0),
    (MATH, "\\boxed{50%}", "50", 0.0),
    (MATH, "\\boxed{\\$5}", "5", 1.0),
    (MATH, "\\boxed{5\\text{ cm}}", "5", 1.0),
    (MATH, "\\boxed{5\\text{cm}}", "5", 0.0),
    (MATH, "\\boxed{90^\\circ}", "90", 1.0),
    (MATH, "\\boxed{90^{\\circ}}", "90", 1.0),
    (MATH, "\\boxed{1,000}", "1000", 0.0),
    (MATH, "\\boxed{10,\\!000}", "10,000", 1.0),
    (MATH, "\\boxed{x = 5}", "5", 1.0),
    (MATH, "\\boxed{abc = 5}", "5", 0.0),
    (MATH, "\\boxed{\\sqrt3}", "\\sqrt{3}", 1.0),
    (MATH, "\\boxed{\\left(1, 2\\right)}", "(1,2)", 1.0),
    (MATH, "\\boxed{\\{1\\}}", "\\{1\\}", 1.0),
    (MATH, "\\boxed{2\\sqrt}", "2\\sqrt", 1.0),
    (MATH, "\\boxed{ 2\\sqrt}", "2\\sqrt", 0.0),
    (MATH, "\\boxed{}", "", 1.0),
    # dapo: the last "Answer:" line within the last 300 characters, else the last box; 1 or -1
    (DAPO, "Answer: 42", "42", 1.0),
    (DAPO, "answer : 42", "42", 1.0),
    (DAPO, "Answer:\n\n42", "42", 1.0),
    (DAPO, "Answer: 41\nAnswer: 42", "42", 1.0),
    (DAPO, "Answer: 42\nAnswer: 41", "42", -1.0),
    (DAPO, "Answer: Answer: 42", "42", -1.0),
    (DAPO, "Answer: $42$", "42", 1.0),
    (DAPO, "Answer: $\\boxed{42}$", "42", 1.0),
    (DAPO, "Answer: it is $42$ of them", "42", 1.0),
    (DAPO, "Answer: 1,234", "1234", 1.0),
    (DAPO, "Answer: 12 cm", "12", 1.0),
    (DAPO, "Answer: 5 dollars", "5", 1.0),
    (DAPO, "Answer: x = 5", "5", 1.0),
    (DAPO, "Answer: 42.", "42", -1.0),
    (DAPO, "Answer: 042", "42", -1.0),
    (DAPO, "Answer: 50\\%", "50", -1.0),
    (DAPO, "Answer: \\frac12", "\\frac{1}{2}", 1.0),
    (DAPO, "Answer: \\sqrt2", "\\sqrt{2}", 1.0),
    (DAPO, "Answer: 90^\\circ", "90", 1.0),
    (DAPO, "Answer: \\text{no}", "no", 1.0),
    (DAPO, "Answer: 42" + "\n" + FAR[:289], "42", 1.0),
    (DAPO, "Answer: 42" + "\n" + FAR[:294], "42", -1.0),
    (DAPO, "so \\boxed{42}", "42", 1.0),
    (DAPO, "so \\boxed{41}", "42", -1.0),
    (DAPO, "\\boxed{42}\nAnswer: 41", "42", -1.0),
    (DAPO, "42", "42", -1.0),
    (DAPO, "", "42", -1.0),
    ("math", "Answer: 42", "42", 1.0),
    ("aime2024", "Answer: 204", "204", 1.0),
    ("aime25", "Answer: 204", "205", -1.0),
    # search: the last pair of answer tags, equal to a target in plain words
    (SEARCH, "<answer>Paris</answer>", PARIS, 1.0),
    (SEARCH, "<answer> paris. </answer>", PARIS, 1.0),
    (SEARCH, "<answer>City of Light</answer>", PARIS, 1.0),
    (SEARCH, "<answer>Paris, France</answer>", PARIS, 0.0),
    (SEARCH, "<answer>Rome</answer> no <answer>Paris</answer>", PARIS, 1.0),
    (SEARCH, "<answer>Paris</answer> no <answer>Rome</answer>", PARIS, 0.0),
    (SEARCH, "<answer>Paris", PARIS, 0.0),
    (SEARCH, "Paris", PARIS, 0.0),
    (SEARCH, "<answer>Pa-ris</answer>", '{"target": "Paris"}', 1.0),
    (SEARCH, "<answer>Paris</answer>" * 10, PARIS, 1.0),
    (SEARCH, "<answer>Paris</answer>" * 11, PARIS, 0.25),
    (SEARCH, "<answer>Rome</answer>" * 11, PARIS, 0.0),
    # geometry: 0.9 for the box, 0.1 for a thought before it
    ("hiyouga/geometry3k", "<think>see</think> \\boxed{5}", "5", 1.0),
    ("hiyouga/geometry3k", "\\boxed{5}", "5", 0.9),
    ("hiyouga/geometry3k", "<think>see</think> 5, \\boxed{\\frac12}", "1/2", 1.0),
    ("hiyouga/geometry3k", "5", "5", 0.0),
]


@pytest.mark.parametrize(("source", "response", "label", "expected"), GOLDENS)
async def test_the_score_is_verls(source: str, response: str, label: str, expected: float) -> None:
    verifier = build_verifier(
        RewardConfig.model_validate({"components": [{"kind": "verl_default"}]}), Surroundings("e")
    )

    (grade,) = await verifier.score([a_sample(response, label, data_source=source)])

    assert grade.reward == pytest.approx(expected)
    assert grade.metrics["verl_default/acc"] == float(expected >= 0.25)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>a</think>\\boxed{1}", True),
        ("<think>a</think>\n\\boxed{1}</think> more", True),
        (" <think>a</think>\\boxed{1}", False),
        ("<think>a \\boxed{1}</think>", False),
        ("<think>a</think>\\boxed{1", False),
        ("<think>\\boxed{1}", False),
    ],
)
def test_the_format_of_geometry_is_a_thought_and_then_a_box(response: str, expected: bool) -> None:
    assert is_formatted_geometry(response) is expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("no code", None),
        ("```python\na\n``` ```python\nb\n```", "\nb\n"),
        ("```cpp\na\n``` ```\nb\n```", "a\n"),
        ("```cpp\na\n```\n```python\nb", "\nb"),
        ("```\na\n```", "\na\n"),
        ("```x = 1\ny\n```", "x = 1\ny\n"),
    ],
)
def test_a_program_is_the_last_python_block_or_the_first_of_all(response: str, expected: str | None) -> None:
    assert fenced_program(response) == expected


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("We get 3. The answer is 4", "4"),
        ("The answer is \\boxed{12}", "12"),
        ("\\boxed{1} and then \\boxed{\\frac{3}{4}}", "\\frac{3}{4}"),
        ("so \\fbox{x = 7}", "7"),
        ("7 is the answer", "7"),
        ("The sum must be\n 9", "9"),
        ("Answer: 5. That was easy", "5"),
        ("x = 1, so x+y = 3", "3"),
        ("nothing", "nothing"),
        ("\\boxed{open", "\\boxed{open"),
    ],
)
def test_what_prime_takes_for_the_answer(response: str, answer: str) -> None:
    assert prime_answer(response) == answer
