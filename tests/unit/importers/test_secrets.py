"""Files to import are often somebody else's, and what is read of them is printed."""

import pytest

from flotilla.importers.systems import read
from flotilla.shared.config.redaction import may_be_secret
from flotilla.shared.errors import InvalidSpec

ENVIRONMENT = {"AWS_SECRET_ACCESS_KEY": "hunter2", "STORE": "https://me:hunter2@store", "DATA": "/data"}


@pytest.mark.parametrize("name", ["AWS_SECRET_ACCESS_KEY", "STORE"])
@pytest.mark.parametrize(
    ("system", "source", "text"),
    [
        ("verl", "a.yaml", "trainer: {{experiment_name: '${{oc.env:{name}}}'}}"),
        ("roll", "a.yaml", "exp_name: '${{oc.env:{name}}}'"),
        ("verl", "a.sh", "python3 -m verl.trainer.main_ppo trainer.experiment_name=${name}"),
    ],
)
def test_a_secret_of_the_environment_is_not_read(name: str, system: str, source: str, text: str) -> None:
    try:
        refusals = [each.refusal for each in read(system, text.format(name=name), [], ENVIRONMENT, source=source)]
    except InvalidSpec as error:
        refusals = [error.detail, repr(error.errors)]

    assert any(name in str(refusal) and "not set" in str(refusal) for refusal in refusals)
    assert "hunter2" not in repr(refusals)


def test_other_variables_and_defaults_are_read() -> None:
    text = "data: {train_files: '${oc.env:DATA}/a', val_files: '${oc.env:AWS_SECRET_ACCESS_KEY,/b}'}"

    found = {each.spelling: each.value for each in read("verl", text, [], ENVIRONMENT, source="a.yaml")}

    assert (found["data.train_files"], found["data.val_files"]) == ("/data/a", "/b")


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        ("HF_TOKEN", True),
        ("WANDB_API_KEY", True),
        ("DB_PASSWORD", True),
        ("MAX_TOKENS", False),
        ("TOKENS_PER_STEP", False),
        ("TOKENIZER_PATH", False),
        ("MODEL_PATH", False),
        ("AUTHOR", False),
    ],
)
def test_names_of_secrets_are_known(name: str, is_secret: bool) -> None:
    assert may_be_secret(name, "x") is is_secret
