"""C files are built once, privately, and done without where they cannot be."""

import shutil
from pathlib import Path

import pytest

from flotilla.shared.models import native_code

load = native_code.load_library.__wrapped__
needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="no C compiler"
)


@needs_compiler
@pytest.mark.parametrize("uses_threads", [True, False])
def test_a_library_that_others_may_write_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uses_threads: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "small.c"
    source.write_text("int answer(void) { return 42; }\n", encoding="ascii")
    library = load(source, uses_threads=uses_threads)
    assert library is not None and library.answer() == 42
    (built,) = (tmp_path / "flotilla").glob("*.so")
    mine = built.stat().st_ino
    load(source, uses_threads=uses_threads)
    assert built.stat().st_ino == mine, "built twice"
    built.chmod(0o777)

    load(source, uses_threads=uses_threads)

    assert built.stat().st_ino != mine
    assert built.stat().st_mode & 0o022 == 0


def test_without_a_compiler_there_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")

    assert load(tmp_path / "small.c") is None


def test_a_source_that_does_not_compile_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "broken.c").write_text("#error no\n", encoding="ascii")

    assert load(tmp_path / "broken.c") is None
