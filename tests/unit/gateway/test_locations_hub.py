import pytest

from flotilla.services.gateway.datasets.locations import files_of_split
from flotilla.shared.errors import DataError

PLAIN = ["README.md", "data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test.parquet"]
README = """---
license: mit
configs:
- config_name: main
  default: true
  data_files:
  - {split: train, path: main/a*.jsonl}
  - {split: test, path: [main/b.jsonl]}
- config_name: extra
  data_files: extra/*.csv
---
# A dataset
"""
CONFIGURED = ["main/a1.jsonl", "main/a2.jsonl", "main/b.jsonl", "extra/x.csv", "README.md"]


def files(
    names: list[str], split: str | None = None, subset: str | None = None, readme: str | None = None
) -> list[str]:
    return files_of_split(names, split=split, subset=subset, readme=readme, where="owner/set")


def test_the_split_is_a_word_in_the_path() -> None:
    assert files(PLAIN) == PLAIN[1:3]
    assert files(PLAIN, "test") == ["data/test.parquet"]
    assert files(["train/x.jsonl", "dev/x.jsonl"], "validation") == ["dev/x.jsonl"]
    assert files(["train/test-cases.jsonl", "train/b.jsonl"], "test") == ["train/test-cases.jsonl"]
    assert files(["trainer/latest.csv"]) == ["trainer/latest.csv"], "no word names a split: all are train"


def test_what_names_no_split_is_left_out_where_others_do() -> None:
    assert files(["train.jsonl", "notes.json"]) == ["train.jsonl"]


def test_the_head_of_the_readme_decides() -> None:
    assert files(CONFIGURED, readme=README) == ["main/a1.jsonl", "main/a2.jsonl"]
    assert files(CONFIGURED, "test", readme=README) == ["main/b.jsonl"]
    assert files(CONFIGURED, subset="extra", readme=README) == ["extra/x.csv"]


def test_a_subset_is_a_folder_where_there_is_no_readme() -> None:
    names = ["en/train.jsonl", "de/train.jsonl"]

    assert files(names, subset="de") == ["de/train.jsonl"]
    assert files(names) == ["de/train.jsonl", "en/train.jsonl"]


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (PLAIN, {"split": "validation"}, "no split 'validation'; splits there: test, train"),
        (["README.md"], {}, "it has no files of rows"),
        (CONFIGURED, {"subset": "none", "readme": README}, "no subset 'none'; subsets there: extra, main"),
        (CONFIGURED, {"readme": README.replace("  default: true\n", "")}, "several subsets, and no default one"),
        (["en/train.jsonl"], {"subset": "fr"}, "no subset 'fr'; folders there: en"),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(names: list[str], options: dict[str, str], message: str) -> None:
    with pytest.raises(DataError) as error:
        files(names, **options)

    assert message in error.value.detail


@pytest.mark.parametrize("readme", ["# no head", "---\n: [\n---\n", "---\nconfigs: 3\n---\n", "---\n- a\n---\n"])
def test_a_readme_without_configs_decides_nothing(readme: str) -> None:
    assert files(PLAIN, readme=readme) == PLAIN[1:3]
