"""Code, files and URLs that a spec names are where the operator allows them, wherever links and patterns lead."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.datasets.loading import load_training
from flotilla.services.gateway.datasets.locations import bounded_glob
from flotilla.services.gateway.preflight.checks import check_code
from flotilla.shared.config.sections.data import DataConfig
from flotilla.shared.errors import DataError, InvalidRequest, InvalidSpec
from flotilla.shared.locations.allowed import GRANTS, Places, code_of, grant_code, read_places, written_of
from tests.unit.gateway.builders import a_spec

ROWS = (
    "import os\n"
    "class Rows:\n"
    "    def __len__(self): return 2\n"
    "    def __getitem__(self, index):\n"
    "        print('not a row')\n"
    "        return {'prompt': 'p', 'label': os.environ.get('FLOTILLA_TOKEN', 'none'), 'pid': os.getpid()}\n"
)


def load(places: Places, **source: Any) -> list[dict[str, Any]]:
    return list(load_training(DataConfig.model_validate({"sources": [source]}), seed=0, places=places).rows)


@pytest.mark.parametrize(
    "reference",
    [
        f"{subprocess.__file__}:Popen",
        f"{Path(json.__file__).parent}/../subprocess.py:Popen",
        f"{pytest.__file__}:main",
        f"{Path(__file__).parents[3]}/shared/locations/allowed.py:Places",
        "/etc/x.py:f",
        "~/x.py:f",
    ],
)
def test_what_is_installed_is_no_code_of_a_spec_even_below_a_folder_that_is_allowed(reference: str) -> None:
    for places in (Places(), Places(code=(Path(__file__).parents[3], Path(sys.prefix)))):
        with pytest.raises(InvalidSpec, match="FLOTILLA_CODE_FOLDERS"):
            places.check_code(reference, "data.sources.0.custom")
        with pytest.raises(InvalidSpec, match="FLOTILLA_CODE_FOLDERS"):
            load(places, custom=reference, options={"args": ["id"]})


def test_code_may_be_below_a_folder_or_in_a_file_that_its_user_started(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine" / "x.py", tmp_path / "other" / "x.py"
    for path in (mine, other):
        path.parent.mkdir()
        path.write_text(ROWS)
    (mine.parent / "link.py").symlink_to(other)
    data = tmp_path / "fleet"
    data.mkdir()
    places = read_places({"FLOTILLA_CODE_FOLDERS": str(mine.parent)}, data)
    places.check_code(f"{mine}:f", "x")
    for refused in (other, mine.parent / "link.py", mine.parent / ".." / "other" / "x.py"):
        with pytest.raises(InvalidSpec, match="in no folder that this fleet runs code from"):
            places.check_code(f"{refused}:f", "x")

    grant_code(data, {"reward": {"components": [{"kind": "custom", "path": f"{other}:f"}]}})

    places.check_code(f"{other}:f", "x")
    (data / GRANTS).chmod(0o666)
    with pytest.raises(InvalidSpec):
        places.check_code(f"{other}:f", "x")


@pytest.mark.parametrize(
    ("tracker", "path"),
    [
        ({"kind": "jsonl", "directory": "{}/x"}, "{}/x"),
        ({"kind": "tensorboard", "directory": "{}"}, "{}"),
        ({"kind": "mlflow", "tracking_uri": "sqlite:///{}/m.db"}, "{}/m.db"),
        ({"kind": "mlflow", "tracking_uri": "file://{}"}, "{}"),
        ({"kind": "mlflow", "tracking_uri": "{}/runs"}, "{}/runs"),
    ],
)
def test_trackers_write_where_the_operator_allows_or_what_its_user_started(
    tmp_path: Path, tracker: dict[str, str], path: str
) -> None:
    data, elsewhere = tmp_path / "fleet", tmp_path / "elsewhere"
    data.mkdir()
    (data / "link").symlink_to("/etc")
    given = {name: value.format(elsewhere) for name, value in tracker.items()}
    spec = a_spec(tracking={"trackers": [given]})
    with pytest.raises(InvalidSpec, match="FLOTILLA_DATA_FOLDERS"):
        check_code(spec, read_places({}, data))
    with pytest.raises(InvalidSpec, match="FLOTILLA_DATA_FOLDERS"):
        check_code(spec, Places(data=(data,)))
    linked = {name: value.format(data / "link") for name, value in tracker.items()}
    with pytest.raises(InvalidSpec, match="FLOTILLA_DATA_FOLDERS"):
        check_code(a_spec(tracking={"trackers": [linked]}), Places(data=(data,)))

    check_code(spec, Places(data=(elsewhere,)))
    grant_code(data, {"tracking": {"trackers": [given]}})
    check_code(spec, read_places({}, data))
    assert written_of({"tracking": {"trackers": [given]}}) == {
        f"tracking.trackers.0.{list(tracker)[1]}": path.format(elsewhere)
    }


@pytest.mark.parametrize(
    ("url", "is_allowed"),
    [
        ("s3://mine/kept", True),
        ("s3://mine/kept/below", True),
        ("s3://mine/kept-not", False),
        ("s3://mine", False),
        ("s3://mine/kept/../other", False),
        ("gs://mine/kept", False),
        ("simplecache::s3://mine/kept", False),
        ("file://{}/kept/a", True),
        ("file://{}/link/a", False),
        ("file://{}/kept/../other", False),
        ("local://{}/kept/a", False),
        ("https://example.org/kept", False),
    ],
)
def test_checkpoints_are_kept_where_the_operator_says_and_nowhere_else(
    tmp_path: Path, url: str, *, is_allowed: bool
) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to("/etc")
    given = url.format(tmp_path)
    values = {"FLOTILLA_CHECKPOINT_URLS": f"s3://mine/kept, file://{tmp_path}/kept"}
    for section in ({"upload_to": given}, {"resume_from": f"{given}@40"}):
        if "::" in given and "upload_to" in section:
            continue  # no upload_to at all
        spec = a_spec(checkpoint=section)
        if is_allowed:
            check_code(spec, read_places(values, tmp_path))
        else:
            with pytest.raises(InvalidSpec, match="FLOTILLA_CHECKPOINT_URLS"):
                check_code(spec, read_places(values, tmp_path))
        with pytest.raises(InvalidSpec, match="FLOTILLA_CHECKPOINT_URLS"):
            check_code(spec, read_places({}, tmp_path))


def test_whoever_starts_a_file_on_the_fleets_machine_may_keep_checkpoints_where_it_says(tmp_path: Path) -> None:
    spec = a_spec(checkpoint={"upload_to": "s3://mine/kept"})

    grant_code(tmp_path, spec.model_dump(mode="json"))

    check_code(spec, read_places({}, tmp_path))
    with pytest.raises(InvalidSpec, match="FLOTILLA_CHECKPOINT_URLS"):
        check_code(a_spec(checkpoint={"upload_to": "s3://mine/kept/below"}), read_places({}, tmp_path))
    with pytest.raises(InvalidRequest, match="FLOTILLA_CHECKPOINT_URLS"):
        read_places({"FLOTILLA_CHECKPOINT_URLS": "mine"}, tmp_path)


def test_trackers_elsewhere_and_in_their_own_directory_are_not_looked_at() -> None:
    trackers = [
        {"kind": "jsonl"},
        {"kind": "wandb", "mode": "offline"},
        {"kind": "mlflow", "tracking_uri": "https://host:5000"},
    ]
    check_code(a_spec(tracking={"trackers": trackers}), Places())


def test_code_is_found_wherever_it_is_in_a_spec() -> None:
    document = {
        "a": [{"b": "/x/y.py:Z"}],
        "c": {"d": "~/y.py:z"},
        "e": "rows.jsonl",
        "f": "call x.py:y",
        "g": None,
        "h": 1,
    }

    assert code_of(document) == {"a.0.b": "/x/y.py:Z", "c.d": "~/y.py:z"}


def test_custom_rows_are_read_in_a_process_that_knows_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOTILLA_TOKEN", "secret")
    (tmp_path / "rows.py").write_text(ROWS)

    rows = load(Places(code=(tmp_path,)), custom=f"{tmp_path}/rows.py:Rows")

    assert [row["label"] for row in rows] == ["none", "none"]
    assert rows[0]["pid"] == rows[1]["pid"] != __import__("os").getpid()


@pytest.mark.parametrize(
    ("body", "error", "match"),
    [
        ("raise ValueError('broken')", InvalidSpec, "importing it failed: ValueError at rows.py:1: broken"),
        ("import os; os._exit(3)", DataError, "its process ended with code 3"),
        (ROWS.replace("'p'", "object()"), DataError, "a row holds what JSON cannot"),
        (ROWS.replace("'p'", "1/0"), DataError, "ZeroDivisionError at rows.py:6"),
        (ROWS.replace("print('not a row')", "os.write(3, b'[1]')"), DataError, "wrote what is no answer"),
    ],
)
def test_what_goes_wrong_in_that_process_is_said(tmp_path: Path, body: str, error: type[Exception], match: str) -> None:
    (tmp_path / "rows.py").write_text(body)

    with pytest.raises(error, match=match):
        load(Places(code=(tmp_path,)), custom=f"{tmp_path}/rows.py:Rows")


def test_that_process_cannot_read_the_memory_of_the_one_that_started_it(tmp_path: Path) -> None:
    peek = "open(f'/proc/{os.getppid()}/mem', 'rb')"
    (tmp_path / "rows.py").write_text(ROWS.replace("'p'", peek))

    with pytest.raises(DataError, match="PermissionError"):
        load(Places(code=(tmp_path,)), custom=f"{tmp_path}/rows.py:Rows")


def test_files_are_below_the_folders_that_are_allowed_wherever_links_lead(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "train.jsonl").write_text('{"prompt": "p", "label": "l"}\n')
    (inside / "link.jsonl").symlink_to(outside / "train.jsonl")
    places = Places(data=(inside,))

    assert len(load(places, path=f"{inside}/train.jsonl")) == 1
    for refused in (
        f"{outside}/train.jsonl",
        f"{inside}/../out/train.jsonl",
        f"{inside}/l*.jsonl",
        f"{tmp_path}/*/t*.jsonl",
        f"{outside}",
        "/",
    ):
        with pytest.raises(DataError, match="FLOTILLA_DATA_FOLDERS"):
            load(places, path=refused)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd.jsonl",
        "local:///etc/passwd.jsonl",
        "sftp://host/x.jsonl",
        "ssh://host/x.jsonl",
        "simplecache::file:///etc/x.jsonl",
        "zip://x.jsonl::http://127.0.0.1/x.zip",
        "reference://x/y.jsonl",
        "s3://b/file:///etc/x.jsonl",
        "memory://x/y.jsonl",
        "HTTP://127.0.0.1/x.jsonl",
    ],
)
def test_only_the_web_and_object_stores_are_read(url: str) -> None:
    with pytest.raises(DataError, match="has one of the protocols"):
        load(Places(), path=url)


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/x.jsonl",
        "http://10.0.0.1/x.jsonl",
        "http://[::ffff:10.0.0.1]/x.jsonl",
        "http://0/x.jsonl",
        "http://127.0.0.1:1/x.jsonl",
        "https://user:word@[fd00::1]/x.jsonl",
    ],
)
def test_the_web_is_read_under_the_address_policy_of_graders(url: str) -> None:
    with pytest.raises(DataError, match="FLOTILLA_GRADER_NETWORKS"):
        load(Places(networks=()), path=url)


def test_a_pattern_looks_at_so_many_entries_and_no_more(tmp_path: Path) -> None:
    for name in ("a/b/x.jsonl", "a/y.jsonl", "c/z.txt", "w.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")

    def found(pattern: str, **bound: int) -> list[str]:
        return sorted(str(Path(each).relative_to(tmp_path)) for each in bounded_glob(f"{tmp_path}/{pattern}", **bound))

    for pattern in ("*.jsonl", "**/*.jsonl", "a/**/*.jsonl", "*/y.jsonl", "[ac]/?.*", "**/*", "a/y.jsonl", "none/*"):
        wanted = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob(pattern) if path.is_file())
        assert found(pattern) == wanted, pattern
    with pytest.raises(DataError, match="too many files"):
        found("**/*", max_entries=5)


def test_a_folder_in_the_environment_is_absolute(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="FLOTILLA_DATA_FOLDERS must be absolute paths"):
        read_places({"FLOTILLA_DATA_FOLDERS": "/data:here"}, tmp_path)
