"""Where the vocabulary is read that the tokens of samples are shown with."""

import json
from pathlib import Path

import pytest

from flotilla.services.gateway.routes.samples import _texts_of
from flotilla.shared.config.sections.model import ModelConfig

NAME = "Qwen/Qwen3-0.6B"


def put(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {text: 0}}}))


def test_texts_of_a_hub_model_come_from_the_cache_not_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    put(tmp_path / NAME, "wrong")
    model = ModelConfig(path=NAME, overrides={"max_position_embeddings": 64})
    before = _texts_of(model)

    kept = tmp_path / "cache" / "models--Qwen--Qwen3-0.6B"
    put(kept / "snapshots" / "abc", "right")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("abc")
    found = _texts_of(model)

    assert before is None
    assert found is not None
    assert found.of([0]) == ["right"]
