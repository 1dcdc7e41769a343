"""A recorded run under another grader has the rewards, filters and advantages of a run that was graded so."""

import asyncio
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flotilla.cli.__main__ import main
from flotilla.cli.commands.regrade import fork_command, reward_section
from flotilla.regrading import Flips, plan, regrade_run
from flotilla.services.reward.decision import Decision, decide, used_names
from flotilla.services.reward.grading import grades_of, with_grades
from flotilla.services.reward.verifiers.registry import Surroundings, build_verifier
from flotilla.services.trainer.data.batch import make_batch
from flotilla.services.trainer.learning.advantages import step_advantages
from flotilla.services.trainer.replay.regraded import NewlyGraded, regraded_advantages
from flotilla.shared.checkpoints.folders import CHECKPOINTS, STATE_FILE, CheckpointState
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidRequest, InvalidSpec
from flotilla.shared.samples.folder import CHANGES, SampleFolder, ended_name, step_name
from flotilla.shared.schemas.live_changes import LiveChange
from flotilla.shared.schemas.sample_kinds import KeptGroup, SampleFile, SampleKind, TrainedTokens
from flotilla.shared.schemas.trajectory import Group, Trajectory
from flotilla.shared.testing.builders import a_task, a_trajectory
from tests.unit.config.test_live import a_change
from tests.unit.trainer.builders import a_spec

ANY_NUMBER = {"kind": "regex", "pattern": r"\d$", "name": "answer"}
RIGHT_NUMBER = {"kind": "exact", "pattern": r"#### (\d+)", "name": "answer"}
TEXTS = (
    ("#### 1", "#### 9", "so 1", "#### 1"),
    ("no", "#### 2", "#### 3", "#### 2"),
    ("#### 3", "5", "#### 7", "#### 3"),
    ("#### 8", "#### 8", "#### 8", "#### 4"),
)


def sampled(number: int) -> Group:
    members = tuple(
        a_trajectory(sampled_tokens=3 + member, seed=10 * number + member, text=text, metrics={"tool/calls": 2.0})
        for member, text in enumerate(TEXTS[number])
    )
    return Group(a_task(number, group_size=4), members, f"What is {number} plus 1?")


FIGURES = ("advantages", "old_log_probs", "log_probs", "weights", "clipped")


def laid(trajectory: Trajectory, value: float) -> np.ndarray:
    """Lay a figure out over sampled tokens, another one for each."""
    mask = trajectory.loss_mask
    return np.where(mask, value * np.arange(mask.shape[0]), np.nan).astype(np.float32)


def spec_of(component: dict[str, Any], **sections: Any) -> ExperimentSpec:
    reward = {"components": [component]} | sections.pop("reward", {})
    return a_spec(reward=reward, **sections)


def decided(spec: ExperimentSpec, group: Group) -> Decision:
    """Grade a group by what a reward service calls, and decide as it does."""

    async def grade() -> Group:
        verifier = build_verifier(spec.reward, Surroundings("e"))
        try:
            grades = await grades_of(verifier, group)
        finally:
            await verifier.aclose()
        return with_grades(group, grades, 0.25, used_names(spec.reward))

    return decide(asyncio.run(grade()), spec.reward)


def advantages_of(spec: ExperimentSpec, groups: Sequence[Group]) -> np.ndarray:
    batch = make_batch(groups)
    found = step_advantages(
        spec,
        batch,
        old_log_probs=batch.rollout_log_probs,
        ref_log_probs=None,
        sum_pi_squared=None,
        values=None,
        kl_coefficient=None,
    )
    return found.advantages[batch.sequences.response_mask].numpy()


def record(directory: Path, spec: ExperimentSpec, changed: Sequence[LiveChange] = ()) -> None:
    """Write the samples of a step and of what was filtered, as trainer and reward service do.

    With live changes there is a fourth step that was trained with them.
    """
    assert spec.samples is not None
    folder = SampleFolder(directory, spec.samples)
    folder.write_spec(spec.model_dump_json())
    trained, ended = [], []
    for number in range(len(TEXTS)):
        group = sampled(number)
        decision = decided(spec, group)
        if decision.trained is None:
            assert decision.reason is not None
            graded = decided(spec_of(ANY_NUMBER), group).trained
            assert graded is not None
            ended.append(KeptGroup(graded, SampleKind.FILTERED, decision.reason))
        else:
            tokens = [
                TrainedTokens(**dict.fromkeys(FIGURES, laid(each, 0.5)), ref_log_probs=laid(each, -0.1), lags=((0, 0),))
                for each in decision.trained.trajectories
            ]
            trained.append(KeptGroup(decision.trained, SampleKind.TRAINED, tokens=tokens))
    folder.write(SampleFile(step_name(3), trained, 3, 2, {}))
    if changed:
        facts = {CHANGES: [each.model_dump(mode="json") for each in changed]}
        folder.write(SampleFile(step_name(4), trained, 4, 3, facts))
    folder.write(SampleFile(ended_name(2, "reward", 1), ended, None, 2))


def lines_of(output: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    return {line["group_id"]: line for line in lines if "group_id" in line}


SECTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"reward": {"shaping": {"scale": 2.0, "overlong": {"max_length": 6, "buffer": 3}}}},
    {"algorithm": {"advantage": {"kind": "reinforce_plus_plus_baseline", "whiten": {}}}},
)


@pytest.mark.parametrize("sections", SECTIONS, ids=["grpo", "shaped", "whitened"])
def test_a_run_under_a_strict_grader_is_as_if_it_had_been_graded_so(tmp_path: Path, sections: dict[str, Any]) -> None:
    reward = {"filter_zero_spread": True} | sections.get("reward", {})
    others = {name: value for name, value in sections.items() if name != "reward"}
    lenient, strict = (spec_of(each, reward=reward, **others) for each in (ANY_NUMBER, RIGHT_NUMBER))
    record(tmp_path, lenient)
    as_graded_so = {number: decided(strict, sampled(number)) for number in range(len(TEXTS))}

    planned = plan(tmp_path, strict.reward.model_dump(mode="json"))
    flips = asyncio.run(regrade_run(planned))

    lines = lines_of(planned.output)
    assert set(lines) == set(range(len(TEXTS)))
    for number, decision in as_graded_so.items():
        outcome = "trained" if decision.trained is not None else f"{decision.resolution}: {decision.reason}"
        assert lines[number]["outcome"] == outcome
        if decision.trained is not None:
            rewards = [each.reward for each in decision.trained.trajectories]
            assert lines[number]["trained_rewards"] == rewards
    trained = [line for line in lines.values() if line["step"] == 3 and line["outcome"] == "trained"]
    wanted = advantages_of(strict, [each for line in trained if (each := as_graded_so[line["group_id"]].trained)])
    found = [
        value
        for line in trained
        for value, t in zip(line["advantages"], sampled(line["group_id"]).trajectories, strict=True)
        for _ in range(t.num_sampled)
    ]
    np.testing.assert_array_equal(np.array(found, np.float32), wanted)
    assert flips.counts["filters"] == sum(line["outcome_was"] != line["outcome"] for line in lines.values())
    assert flips.counts["rewards"] >= 3
    assert flips.first_step == 3
    assert {each.completion for each in flips.examples} & {"#### 9", "so 1", "5", "#### 3", "#### 8"}


def test_a_filtered_group_that_would_teach_has_the_advantages_of_its_group(tmp_path: Path) -> None:
    lenient, strict = (spec_of(each, reward={"filter_zero_spread": True}) for each in (ANY_NUMBER, RIGHT_NUMBER))
    record(tmp_path, lenient)

    planned = plan(tmp_path, strict.reward.model_dump(mode="json"))
    flips = asyncio.run(regrade_run(planned))

    line = lines_of(planned.output)[0]
    assert (line["outcome_was"], line["outcome"]) == ("filtered: zero_spread", "trained")
    trained = decided(strict, sampled(0)).trained
    assert trained is not None
    [members] = regraded_advantages(strict, [NewlyGraded(KeptGroup(trained, SampleKind.FILTERED), trained)])
    wanted = advantages_of(strict, [trained])
    laid = np.concatenate([each[~np.isnan(each)] for each in members if each is not None])
    np.testing.assert_array_equal(laid, wanted)
    assert line["advantages"] == [float(np.nanmean(each)) for each in members if each is not None]
    assert flips.outcomes["filtered: zero_spread", "trained"] >= 1


def test_an_interrupted_call_goes_on_after_its_last_whole_file(tmp_path: Path) -> None:
    record(tmp_path, spec_of(ANY_NUMBER, reward={"filter_zero_spread": True}))
    planned = plan(tmp_path, {"components": [RIGHT_NUMBER], "filter_zero_spread": True})
    whole = asyncio.run(regrade_run(planned)).document()
    text = planned.output.read_text(encoding="utf-8")
    first_file = text.index("\n", text.index('"done"')) + 1
    planned.output.write_text(text[: first_file + 40], encoding="utf-8")
    told: list[tuple[int, int]] = []

    again = asyncio.run(regrade_run(planned, lambda done, of: told.append((done, of)))).document()

    assert again == whole
    assert planned.output.read_text(encoding="utf-8") == text
    assert told[-1] == (2, 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda line: 7,
        lambda line: line | {"rewards": "many"},
        lambda line: line | {"rewards": line["rewards"][:1]},
        lambda line: line | {"reasons": []},
        lambda line: line | {"advantages": [[1.0]]},
    ],
)
def test_a_line_of_another_shape_is_graded_again(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    record(tmp_path, spec_of(ANY_NUMBER))
    planned = plan(tmp_path, {"components": [RIGHT_NUMBER]})
    whole = asyncio.run(regrade_run(planned)).document()
    text = planned.output.read_text(encoding="utf-8")
    header, *lines = text.splitlines(keepends=True)
    other = [json.dumps(change(json.loads(line))) + "\n" if '"rewards"' in line else line for line in lines]
    planned.output.write_text("".join([header, *other]), encoding="utf-8")

    again = asyncio.run(regrade_run(planned)).document()

    assert again == whole
    assert planned.output.read_text(encoding="utf-8") == text


def test_an_output_of_another_grader_is_not_written_over(tmp_path: Path) -> None:
    record(tmp_path, spec_of(ANY_NUMBER))
    output = tmp_path / "out.jsonl"
    asyncio.run(regrade_run(plan(tmp_path, {"components": [RIGHT_NUMBER]}, output)))

    with pytest.raises(InvalidRequest, match="another grader"):
        asyncio.run(regrade_run(plan(tmp_path, {"components": [ANY_NUMBER]}, output)))


def test_a_group_whose_masks_hid_sampled_tokens_is_left_out_and_counted(tmp_path: Path) -> None:
    record(tmp_path, spec_of(ANY_NUMBER, reward={"sample_mask": {"truncated": True, "max_length": 5}}))

    flips = asyncio.run(regrade_run(plan(tmp_path, {"components": [RIGHT_NUMBER]})))

    assert flips.counts["groups_without_masks"] > 0
    assert flips.counts["samples"] == 4 * (flips.counts["groups"] - flips.counts["groups_without_masks"])


def test_the_command_prints_what_flips_and_how_to_fork(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = tmp_path / "arithmetic-1a2b3c"
    experiment.mkdir()
    record(experiment, spec_of(ANY_NUMBER, reward={"filter_zero_spread": True}))
    section = tmp_path / "new.yaml"
    section.write_text(json.dumps({"reward": {"components": [RIGHT_NUMBER], "filter_zero_spread": True}}))

    assert main(["regrade", str(experiment), "--reward", str(section)]) == 0

    printed = capsys.readouterr().out
    assert "would be other" in printed
    assert "run the spec with the new section from the start" in printed


def test_a_file_without_a_reward_section_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: x\n")
    record(tmp_path, spec_of(ANY_NUMBER))

    with pytest.raises(InvalidRequest, match="neither a reward section"):
        reward_section(tmp_path / "a.yaml")
    with pytest.raises(InvalidSpec):
        plan(tmp_path, {"components": [{"kind": "exakt"}]})
    with pytest.raises(InvalidRequest, match="no samples"):
        plan(tmp_path / "elsewhere", {"components": [RIGHT_NUMBER]})


def test_a_grader_whose_code_changed_grades_again(tmp_path: Path) -> None:
    record(tmp_path, spec_of(ANY_NUMBER))
    grader = tmp_path / "mine.py"
    grader.write_text("def grade(sample):\n    return 1.0\n")
    section = {"components": [{"kind": "custom", "path": f"{grader}:grade"}]}
    before, named = plan(tmp_path, section), tmp_path / "named.jsonl"
    named.write_text(before.header, encoding="utf-8")

    grader.write_text("def grade(sample):\n    return 0.0\n")

    assert plan(tmp_path, section).output != before.output
    with pytest.raises(InvalidRequest, match="as it was: name another file"):
        asyncio.run(regrade_run(plan(tmp_path, section, named)))


def test_each_step_has_the_settings_that_it_was_trained_with(tmp_path: Path) -> None:
    spec = spec_of(ANY_NUMBER, algorithm={"kl": {"placement": "reward", "coefficient": 0.5}})
    change = a_change("c1", ("algorithm.kl.coefficient", 0.5, 4.0), version=3)
    record(tmp_path, spec, [change])

    planned = plan(tmp_path, spec.reward.model_dump(mode="json"))
    files = {file.name: file for file in planned.files}
    coefficients = []
    for name, facts in ((step_name(3), {}), (step_name(4), {CHANGES: [change.model_dump()]})):
        kl = planned.spec_of(files[name], facts).algorithm.kl
        assert kl is not None
        coefficients.append(kl.coefficient)
    asyncio.run(regrade_run(planned))

    assert coefficients == [0.5, 4.0]
    assert planned.spec_of(files[ended_name(2, "reward", 1)], {}) == planned.spec
    lines = [json.loads(line) for line in planned.output.read_text().splitlines()]
    found: dict[str, list[Any]] = {"step-00000003.parquet": [], "step-00000004.parquet": []}
    for line in lines:
        if line.get("step"):
            found[line["file"]].append(line["advantages"])
    assert found["step-00000003.parquet"] != found["step-00000004.parquet"], "the KL in the reward counts for more"


def test_a_section_reads_no_environment_variable_that_was_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = tmp_path / "arithmetic-1a2b3c"
    experiment.mkdir()
    record(experiment, spec_of(ANY_NUMBER))
    section = tmp_path / "new.yaml"
    remote = {"kind": "remote", "urls": [{"url": "http://127.0.0.1:9"}], "secret_env": "CLOUD_KEY"}
    section.write_text(json.dumps({"components": [remote]}))
    monkeypatch.setenv("CLOUD_KEY", "precious")

    assert main(["regrade", str(experiment), "--reward", str(section)]) != 0
    assert "--secret CLOUD_KEY" in capsys.readouterr().err

    monkeypatch.delenv("CLOUD_KEY")
    assert main(["regrade", str(experiment), "--reward", str(section), "--secret", "CLOUD_KEY"]) != 0
    assert "is not set" in capsys.readouterr().err


def test_the_fork_that_it_suggests_is_one_word_of_a_shell(tmp_path: Path) -> None:
    experiment = tmp_path / "x; touch pwned"
    experiment.mkdir()
    record(experiment, spec_of(ANY_NUMBER))
    state = CheckpointState(
        experiment_id="x",
        step=1,
        version=1,
        lineage="",
        updates=1,
        trained=[],
        seed=0,
        kl_coefficient=None,
        totals={},
        spec={},
        software={},
        files={},
    )
    (experiment / CHECKPOINTS / "step-00000001").mkdir(parents=True)
    (experiment / CHECKPOINTS / "step-00000001" / STATE_FILE).write_text(state.model_dump_json())

    command = fork_command(plan(experiment, {"components": [RIGHT_NUMBER]}), Flips(first_step=3))

    assert command is not None
    assert shlex.split(command)[:3] == ["flotilla", "fork", "x; touch pwned@1"]


def test_no_link_of_the_folder_is_followed_to_the_output(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    elsewhere.mkdir()
    record(run, spec_of(ANY_NUMBER))
    planned = plan(run, {"components": [RIGHT_NUMBER]})
    planned.output.parent.symlink_to(elsewhere)

    with pytest.raises(OSError, match="is a link"):
        asyncio.run(regrade_run(planned))

    assert list(elsewhere.iterdir()) == []
