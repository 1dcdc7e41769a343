import pytest

from flotilla.importers.systems import read
from flotilla.shared.errors import InvalidSpec

VERL = """
python3 -m verl.trainer.fsdp_sft_trainer data.train_files=sft.parquet model.partial_pretrain=base
python3 -m verl.trainer.main_ppo data.train_files=rl.parquet actor_rollout_ref.model.path=base
"""
TWICE = """
python3 -m verl.trainer.main_ppo data.train_files=a.parquet
python3 -m verl.trainer.main_ppo data.train_files=b.parquet
"""
OPENRLHF = """
deepspeed --module openrlhf.cli.train_sft --pretrain base --dataset sft.jsonl
deepspeed --module openrlhf.cli.train_dpo --pretrain base --dataset pairs.jsonl
"""


def values(system: str, text: str, program: int | None) -> dict[str, object]:
    return {each.spelling: each.value for each in read(system, text, (), {}, source="run.sh", program=program)}


@pytest.mark.parametrize(("program", "rows"), [(1, "a.parquet"), (2, "b.parquet")])
def test_the_number_says_which_program_of_verl_is_read(program: int, rows: str) -> None:
    assert values("verl", TWICE, program)["data.train_files"] == rows


def test_a_trainer_on_finished_answers_counts_too() -> None:
    assert values("verl", VERL, 1)["data.train_files"] == "sft.parquet"
    assert values("verl", VERL, 2)["data.train_files"] == "rl.parquet"
    assert values("verl", VERL, None)["data.train_files"] == "rl.parquet"


@pytest.mark.parametrize(("program", "rows"), [(1, "sft.jsonl"), (2, "pairs.jsonl")])
def test_the_number_says_which_program_of_openrlhf_is_read(program: int, rows: str) -> None:
    assert values("openrlhf", OPENRLHF, program)["--dataset"] == rows


@pytest.mark.parametrize(
    ("system", "text", "names"),
    [("verl", TWICE, "1 is verl.trainer.main_ppo"), ("openrlhf", OPENRLHF, "2 is openrlhf.cli.train_dpo")],
)
def test_several_programs_are_listed_where_no_number_says_which(system: str, text: str, names: str) -> None:
    with pytest.raises(InvalidSpec, match="--program N") as caught:
        values(system, text, None)
    assert names in caught.value.detail


def test_a_number_beyond_the_programs_is_refused_with_their_list() -> None:
    with pytest.raises(InvalidSpec, match=r"1 is verl\.trainer\.main_ppo, 2 is verl\.trainer\.main_ppo"):
        values("verl", TWICE, 3)


def test_a_number_beside_yaml_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="no script"):
        read("verl", "data: {train_files: a.parquet}", (), {}, source="a.yaml", program=1)
