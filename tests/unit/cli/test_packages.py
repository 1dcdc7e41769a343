"""A missing package is said in one sentence before anything starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from flotilla.packages import check_packages, check_quantisation
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidSpec, Unavailable
from tests.unit.gateway.builders import a_spec

WITHOUT_TORCH = """
import sys
from importlib import util
find = util.find_spec
util.find_spec = lambda name, package=None: None if name in {"torch", "transformers"} else find(name, package)
from flotilla.cli.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_what_is_missing_is_named_with_the_command_that_installs_it() -> None:
    check_packages(lambda name: True)
    with pytest.raises(Unavailable, match=r"^torch is not installed, .* pip install 'flotilla\[torch\]'"):
        check_packages(lambda name: name != "torch")
    with pytest.raises(Unavailable, match=r"^torch and jinja2 are not installed"):
        check_packages(lambda name: name not in {"torch", "jinja2"})
    with pytest.raises(Unavailable, match=r"^torch, transformers, safetensors and jinja2 are not installed"):
        check_packages(lambda name: False)


def test_packed_weights_need_bitsandbytes_where_they_are_trained() -> None:
    def adapted(**lora: object) -> ExperimentSpec:
        return a_spec(model={"path": "model", "lora": {"rank": 4, **lora}})

    check_quantisation(adapted(), lambda name: False)
    check_quantisation(adapted(quantisation={"dtype": "nf4"}), lambda name: True)
    with pytest.raises(
        InvalidSpec, match=r"^model\.lora\.quantisation needs bitsandbytes, .*'flotilla\[bitsandbytes\]'"
    ):
        check_quantisation(adapted(quantisation={"dtype": "nf4"}), lambda name: name != "bitsandbytes")


def test_without_torch_a_run_says_so_and_starts_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, "run", "nowhere.yaml", "--runs", str(tmp_path / "runs")]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)

    assert done.returncode == 4, "something that is needed is not there"
    assert done.stderr.startswith("flotilla: torch and transformers are not installed")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
