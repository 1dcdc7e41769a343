"""`flotilla show`: samples of a running fleet, or of files where none runs."""

import base64
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flotilla.cli.__main__ import main
from flotilla.cli.commands.show import _write_page
from flotilla.cli.exit_codes import ExitCode
from flotilla.cli.right_and_wrong import lines_of
from flotilla.cli.sample_text import describe
from flotilla.shared.config.sections.tracking import SamplesConfig
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.samples.folder import SampleFolder, ended_name
from flotilla.shared.samples.reading import ReadSample
from flotilla.shared.samples.table import ILLUSTRATED_SCHEMA, SCHEMA, facts_of, to_groups, to_table
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.prompt_image import PromptImage
from flotilla.shared.schemas.sample_kinds import KeptGroup, SampleFile, SampleKind
from flotilla.shared.schemas.turns import FinishReason, Turn
from tests.unit.cli.gateway import serve
from tests.unit.cli.test_reference import views
from tests.unit.samples.builders import a_step
from tests.vision_models import a_picture

SAMPLE = ReadSample(
    id="step-00000030/3/1",
    kind="trained",
    step=30,
    version=29,
    row=211,
    group_id=487,
    member=1,
    data_source=None,
    messages=[{"role": "user", "content": "6 times 7?"}],
    prompt="What is 6 times 7?",
    completion="It is\n41",
    label="42",
    answer="41",
    status="scored",
    reward=0.0,
    components={"exact": 0.0, "length": -0.5},
    metrics={"custom/characters": 8.0, "custom/share": 0.25},
    timings={},
    reason="41 is not 42",
    ended=None,
    finish_reason="stop",
    num_sampled=4,
    turns=(),
    is_baseline=False,
    oldest_version=29,
    newest_version=29,
    lag=1,
    advantage=-0.83,
    tokens=None,
)


def a_run(directory: Path) -> Path:
    experiment = directory / "fleet" / "experiments" / "tiny-aa11"
    experiment.mkdir(parents=True)
    folder = SampleFolder(experiment, SamplesConfig())
    for step in (1, 2):
        folder.write(a_step(step, rewards=(1.0, 0.0)))
    return directory


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["show", *words, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_a_sample_says_what_was_asked_written_and_come_to() -> None:
    text = describe(SAMPLE).plain

    assert text.splitlines() == [
        "step 30  problem 211  group 487.1  reward 0  stop, 4 tokens, version 29, lag 1, advantage -0.830",
        "  prompt     What is 6 times 7?",
        "  completion It is",
        "             41",
        "  label      42",
        "  answer     41",
        "  components exact 0  length -0.500",
        "  metrics    custom/characters 8  custom/share 0.250",
        "  grader     41 is not 42",
    ]


def test_turns_are_shown_one_after_the_other_with_what_they_earned() -> None:
    turns = [
        {"observation": "", "text": "Left", "reward": 0.0},
        {"observation": "_P\n_G", "text": "Down", "reward": 1.0},
    ]

    text = describe(replace(SAMPLE, turns=turns)).plain

    lines = [line.strip() for line in text.splitlines()]
    places = [next(n for n, line in enumerate(lines) if line.startswith(part)) for part in ("turn 1", "_P", "turn 2")]
    assert places == sorted(places)
    assert lines[places[2]].endswith("Down   [1]")
    assert "completion" not in text


def test_why_a_group_was_not_trained_is_said_in_words() -> None:
    lines = describe(replace(SAMPLE, kind="filtered", ended="zero_spread")).plain.splitlines()

    assert lines[-1] == "  group      filtered: all answers had the same reward, which teaches nothing (zero_spread)"


def test_where_no_step_was_made_what_was_filtered_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = tmp_path / "experiments" / "tiny-aa11"
    experiment.mkdir(parents=True)
    step = a_step(1, num_groups=1, rewards=(0.0, 0.0))
    filtered = [KeptGroup(each.group, SampleKind.FILTERED, "zero_spread") for each in step.groups]
    SampleFolder(experiment, SamplesConfig()).write(SampleFile(ended_name(0, "reward", 1), filtered, None, 0))

    assert main(["show", str(tmp_path)]) == 0

    said = capsys.readouterr().out
    assert said.startswith("nothing was trained yet; what else is kept:")
    assert "filtered" in said
    assert shown(capsys, str(tmp_path)) == []


@pytest.mark.parametrize(
    ("words", "said"), [((), "no samples are kept yet"), (("--step", "3"), "no sample is like that: --step")]
)
def test_no_samples_yet_and_none_like_that_are_told_apart(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fleet" / "experiments" / "tiny-aa11" / "samples").mkdir(parents=True)

    assert main(["show", str(tmp_path), *words]) == 0

    assert capsys.readouterr().out.startswith(said)


def test_a_long_text_is_shortened_unless_it_is_wanted_whole() -> None:
    long = replace(SAMPLE, completion="x" * 5000)

    assert "[... 3500 characters more: --full ...]" in describe(long).plain
    assert "x" * 5000 in describe(long, is_whole=True).plain


def test_two_samples_in_lines_are_called_right_and_wrong_only_where_rewards_say_so() -> None:
    right = replace(SAMPLE, reward=1.0, completion="42")

    assert lines_of([right, SAMPLE]) == [
        ("right", "6 times 7? -> 42   (reward 1, label 42)"),
        ("wrong", "6 times 7? -> It is 41   (reward 0, label 42)"),
    ]
    assert [name for name, _ in lines_of([replace(right, reward=0.7), SAMPLE])] == ["best", "worst"]


def test_a_gateway_is_asked_with_what_was_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = {"items": [vars(SAMPLE)], "next": None, "num_files": 1, "num_unread": 0}
    gateway = serve(
        monkeypatch, views(("tiny-aa11", ExperimentState.RUNNING)), {"/experiments/tiny-aa11/samples": page}
    )

    assert main(["show", "tiny", "--step", "30", "--worst", "--gateway", "http://gateway"]) == 0

    assert "41 is not 42" in capsys.readouterr().out
    assert gateway.asked[-1] == "GET /experiments/tiny-aa11/samples"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], [(2, 1.0), (2, 0.0), (2, 1.0), (2, 0.0)]),
        (["--step", "1", "--worst", "-n", "2"], [(1, 0.0), (1, 0.0)]),
        (["--best", "-n", "1"], [(2, 1.0)]),
        (["--problem", "1", "--step", "1"], [(1, 1.0), (1, 0.0)]),
        (["--failed"], []),
        (["--kind", "filtered"], []),
    ],
)
def test_the_files_of_a_run_that_ended_are_read(
    words: list[str], found: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items = shown(capsys, str(a_run(tmp_path)), *words)

    assert [(item["step"], item["reward"]) for item in items] == found


def test_a_data_directory_without_a_fleet_is_read_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FLOTILLA_GATEWAY_URL", raising=False)
    data = str(a_run(tmp_path) / "fleet")

    assert len(shown(capsys, "tiny", "--data", data, "--tokens", "-n", "1")[0]["tokens"]["token_ids"]) == 8
    assert main(["show", "other", "--data", data]) == ExitCode.NOT_FOUND
    assert main(["show", "tiny", "--data", str(tmp_path / "nowhere")]) == ExitCode.UNREACHABLE


def test_a_path_that_is_not_there_is_named_rather_than_a_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FLOTILLA_GATEWAY_URL", raising=False)
    misspelt = str(tmp_path / "runs" / "tinny")

    assert main(["show", misspelt, "--data", str(tmp_path / "nowhere")]) == ExitCode.NOT_FOUND
    assert capsys.readouterr().err == f"flotilla: there is no directory {misspelt}\n"
    assert main(["replay", misspelt, "5", "--data", str(tmp_path / "nowhere")]) == ExitCode.NOT_FOUND


def test_files_are_shown_without_libraries_that_they_do_not_need(tmp_path: Path) -> None:
    code = "import sys; from flotilla.cli.__main__ import main; main(); print(*sys.modules)"
    words = ["show", str(a_run(tmp_path)), "--worst", "--json"]

    shown = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True).stdout

    samples, loaded = shown.rstrip("\n").rsplit("\n", 1)
    assert len(json.loads(samples)) == 4
    assert set(loaded.split()).isdisjoint({"numpy", "pandas", "pydantic", "pyarrow.compute", "httpx", "torch"})


def with_images(file: SampleFile, *images: bytes) -> SampleFile:
    groups = []
    for kept in file.groups:
        group = replace(kept.group, task=replace(kept.group.task, images=images), prompt="<b>which?</b>")
        groups.append(replace(kept, group=group))
    return replace(file, groups=groups)


def test_a_page_shows_the_images_of_prompts_and_no_markup_of_theirs(tmp_path: Path) -> None:
    experiment = tmp_path / "fleet" / "experiments" / "tiny-aa11"
    experiment.mkdir(parents=True)
    folder = SampleFolder(experiment, SamplesConfig())
    folder.write(with_images(a_step(1), a_picture("red"), b"<script>alert(1)</script>"))
    page = tmp_path / "samples.html"

    assert main(["show", str(tmp_path), "--html", str(page)]) == 0

    written = page.read_text()
    assert written.count(base64.b64encode(a_picture("red")).decode()) == 4
    assert "&lt;b&gt;which?&lt;/b&gt;" in written
    assert "<b>" not in written
    assert "<script" not in written
    assert "a format that is not shown" in written


def test_a_page_of_a_fleet_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="name its directory"):
        _write_page(tmp_path / "page.html", None, [SAMPLE])


def test_images_are_kept_once_for_a_group_and_come_back(tmp_path: Path) -> None:
    file = with_images(a_step(1, num_groups=2), a_picture("red"), a_picture("blue"))

    table = to_table(file)

    assert table.column("images").null_count == table.num_rows - 2
    assert [kept.group.task.images for kept in to_groups(table)] == [(a_picture("red"), a_picture("blue"))] * 2
    assert "images" not in to_table(a_step(1)).column_names
    assert facts_of(table.schema.metadata)["schema"] == SCHEMA


def shown_later(file: SampleFile) -> SampleFile:
    """Let each member see the task's picture, one that all see and one of its own before its second turn."""
    groups = []
    for kept in file.groups:
        members = [
            replace(
                each,
                turns=(Turn(0, 1, 2, FinishReason.STOP), Turn(2, 3, len(each.token_ids), FinishReason.STOP)),
                images=(
                    PromptImage(0, 1, a_picture("red")),
                    PromptImage(2, 1, a_picture("blue") if number % 2 else a_picture(seed=1)),
                ),
            )
            for number, each in enumerate(kept.group.trajectories)
        ]
        groups.append(replace(kept, group=replace(kept.group, trajectories=tuple(members))))
    return replace(file, groups=groups)


def test_pictures_of_later_turns_are_kept_once_for_a_group_and_a_page_shows_them(tmp_path: Path) -> None:
    file = shown_later(with_images(a_step(1, num_groups=2), a_picture("red")))
    table = to_table(file)

    added = [each for row in table.column("added_images").to_pylist() for each in row or ()]
    assert sorted(added) == sorted([a_picture("blue"), a_picture(seed=1)] * 2)
    expected = [each.images for kept in file.groups for each in kept.group.trajectories]
    assert [each.images for kept in to_groups(table) for each in kept.group.trajectories] == expected
    assert facts_of(table.schema.metadata)["schema"] == ILLUSTRATED_SCHEMA, "an earlier release would read them as text"
    experiment = tmp_path / "fleet" / "experiments" / "tiny-aa11"
    experiment.mkdir(parents=True)
    SampleFolder(experiment, SamplesConfig()).write(file)
    page = tmp_path / "samples.html"

    assert main(["show", str(tmp_path), "--html", str(page), "-n", "4"]) == 0

    written = page.read_text()
    for picture, count in ((a_picture("red"), 4), (a_picture("blue"), 2), (a_picture(seed=1), 2)):
        assert written.count(base64.b64encode(picture).decode()) == count
    assert written.count("<p>Shown before turn 2:</p><img") == 4
