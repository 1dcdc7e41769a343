"""``flotilla engine install`` as it is typed, interrupted while pip works."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SLOW_PIP = "import time; open('PLACE/pip-runs', 'w').close(); time.sleep(300)"


def test_ctrl_c_while_pip_works_leaves_nothing(tmp_path: Path) -> None:
    modules = tmp_path / "modules"
    (modules / "pip").mkdir(parents=True)
    (modules / "pip" / "__init__.py").touch()
    (modules / "pip" / "__main__.py").write_text(SLOW_PIP.replace("PLACE", str(tmp_path)))
    (modules / "venv.py").write_text(
        "import os, sys\nos.makedirs(sys.argv[1] + '/bin')\nos.symlink(sys.executable, sys.argv[1] + '/bin/python')\n"
    )
    place = tmp_path / "place"
    command = [sys.executable, "-m", "flotilla", "engine", "install", "vllm", "--path", str(place / "engine")]
    paths = os.pathsep.join([str(modules), *filter(None, sys.path)])
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": paths}, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    while not (tmp_path / "pip-runs").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)

    process.send_signal(signal.SIGINT)

    out, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "flotilla: ended by request\n")
    assert "pip install vllm==0.32.0" in out
    assert list(place.iterdir()) == []
