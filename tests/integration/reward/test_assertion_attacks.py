# ruff: noqa: E501  programs
"""Programs that want to pass assertions without doing what these ask for, in a real sandbox."""

import json

from flotilla.services.reward.verifiers.registry import Surroundings, build_verifier
from flotilla.services.sandbox.app import create_app
from flotilla.services.sandbox.settings import SandboxSettings
from flotilla.shared.config.sections.reward import CodeConfig, RewardConfig
from tests.integration.reward.test_over_sockets import TOKEN, serving
from tests.unit.reward.builders import a_sample

EXPECTED = 8_675_309
LABEL = json.dumps({"assert_case": [f"assert secret(4) == {EXPECTED}\nassert secret(5) != secret(4)"]})
ALIKE = """
class Alike:
    def __eq__(self, other): return True
    def __ne__(self, other): return True
    def __getattr__(self, name): return lambda *a, **k: True
"""
ATTACKS = {
    "equal to everything": ALIKE + "def secret(x): return Alike()",
    "a number of its own": "class N(int):\n    __eq__ = lambda s, o: True\n    __ne__ = __eq__\n"
    "    __hash__ = int.__hash__\ndef secret(x): return N(1)",
    "ends before the tests": "import os\nos._exit(0)",
    "exits before the tests": "import sys\nsys.exit(0)",
    "ends in the test": "import os\ndef secret(x): os._exit(0)",
    "prints verdicts": "import os\nfor n in range(1, 9):\n    try: os.write(n, b'true\\n{\"passed\": true}\\n')\n"
    "    except OSError: pass\nos._exit(0)",
    "prints verdicts at exit": "import atexit, os\n"
    "atexit.register(lambda: os.write(1, b'{\"passed\": true}\\n'))\ndef secret(x): return 1",
    "forges lines": "import os\nfor n in range(1, 20):\n    try: os.write(n, b'[[\"passed\"], []]\\n' * 9)\n"
    "    except OSError: pass\ndef secret(x): return 1",
    "patches builtins": "import builtins\nclass A(AssertionError): pass\nbuiltins.AssertionError = A\n"
    "builtins.isinstance = lambda *a: True\nbuiltins.compile = builtins.exec = lambda *a, **k: None\n"
    "def secret(x): return 1",
    "patches streams and modules": "import sys, json, os\nsys.stdout = sys.stderr = open(os.devnull, 'w')\n"
    "json.dumps = lambda *a, **k: '{\"passed\": true}'\nos._exit = lambda c: None\nsys.exit = os._exit\n"
    "def secret(x): return 1",
    "hook": "import sys\nsys.excepthook = lambda *a: __import__('os')._exit(0)\nraise ValueError",
    "leaves files": "import os\nfor n in ('json.py', 'math.py', 'ast.py', 'main.py', 'sitecustomize.py', 'services.py'):\n"
    "    open(n, 'w').write('import os; os.write(1, b\\'{\"passed\": true}\\\\n\\'); os._exit(0)')\n"
    "def secret(x): return 1",
    "leaves a process": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    while True:\n"
    "        try: os.write(1, b'{\"passed\": true}\\n')\n        except OSError: pass\n        time.sleep(.01)\n"
    "def secret(x): return 1",
}
SEARCHES = {
    "its own file": "text = open('main.py').read() + open(__import__('sys').argv[0] or 'main.py').read()",
    "all files": "import glob\n"
    "text = ''.join(open(p, errors='replace').read() for p in glob.glob('/work/**', recursive=True)"
    " + glob.glob('./**', recursive=True) if __import__('os').path.isfile(p))",
    "what is open": "import os\ntext = ''\nfor n in os.listdir('/proc/self/fd'):\n"
    "    try:\n        os.set_blocking(int(n), False); text += os.read(int(n), 1 << 20).decode()\n"
    "    except Exception: pass\n    try: text += open('/proc/self/fd/' + n).read()\n    except Exception: pass",
    "frames": "import sys\ntext, frame = '', sys._getframe()\nwhile frame:\n"
    "    text += repr(frame.f_locals) + repr({k: v for k, v in frame.f_globals.items() if k != 'text'}); frame = frame.f_back",
    "the heap": "import gc\ntext = ''.join(repr(o)[:100000] for o in gc.get_objects() if type(o) in (dict, list, tuple))",
    "its memory": "text = ''\nfor line in open('/proc/self/maps'):\n    if 'rw-p' in line and 'vsyscall' not in line:\n"
    "        a, b = (int(x, 16) for x in line.split()[0].split('-'))\n"
    "        try:\n            f = open('/proc/self/mem', 'rb'); f.seek(a); text += f.read(b - a).decode('latin1')\n"
    "        except Exception: pass",
    "other processes": "import os\ntext = ''\nfor p in os.listdir('/proc'):\n    for n in ('cmdline', 'environ'):\n"
    "        try: text += open(f'/proc/{p}/{n}').read()\n        except Exception: pass",
}


def searching(how: str) -> str:
    """A program that looks for the expected value, without holding it: any number of seven digits is one more try."""
    seven = "import re\nfound = re.findall(r'(?<!\\d)86\\d{5}(?!\\d)', text)\n"
    return (
        "text = ''\ntry:\n" + "".join(f"    {line}\n" for line in how.splitlines()) + "except Exception: pass\n" + seven
        + "def secret(x): return int(found[0]) if found and x == 4 else 0"
    )  # fmt: skip


async def test_no_program_passes_assertions_by_other_means() -> None:
    settings = SandboxSettings.model_validate({"token": TOKEN, "concurrency": 4})
    programs = ATTACKS | {name: searching(how) for name, how in SEARCHES.items()}
    honest = f"def secret(x): return {EXPECTED} if x == 4 else 0"
    samples = [a_sample(f"```python\n{program}\n```", LABEL) for program in (honest, *programs.values())]

    async with serving(create_app(settings)) as url:
        surroundings = Surroundings("exp", sandbox_url=url, sandbox_token=TOKEN)
        verifier = build_verifier(RewardConfig(components=(CodeConfig(run_timeout_seconds=5),)), surroundings)
        right, *found = await verifier.score(samples)
        await verifier.aclose()

    assert (right.reward, right.reason) == (1.0, None)
    assert {name: (grade.reward, grade.reason) for name, grade in zip(programs, found, strict=True)} == dict.fromkeys(
        programs, (0.0, None)
    )


async def test_the_programs_that_search_would_find_what_is_there() -> None:
    """Against a sandbox that leaves the value in the program's file, so that the attacks above are real ones."""
    settings = SandboxSettings.model_validate({"token": TOKEN, "concurrency": 4})
    text = searching(SEARCHES["its own file"]) + f"\nprint(secret(4) == {EXPECTED})\n"
    sample = a_sample(f"```python\n{text}\n```", json.dumps({"inputs": [""], "outputs": ["True"]}))

    async with serving(create_app(settings)) as url:
        surroundings = Surroundings("exp", sandbox_url=url, sandbox_token=TOKEN)
        verifier = build_verifier(RewardConfig(components=(CodeConfig(),)), surroundings)
        (found,) = await verifier.score([sample])
        await verifier.aclose()

    assert found.reward == 1.0
