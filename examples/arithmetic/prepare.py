"""Make everything the arithmetic example trains on: a tiny model with a weak start, and its problems.

    python examples/arithmetic/prepare.py --preset standard --output DIR --seed 0

DIR appears complete or not at all. A second call with the same settings returns at once. The model of the
standard preset and seed 0 is kept beside this file, and taken unless --make is given.
"""

import sys
from pathlib import Path

if not __package__:  # executed by path: make the package that this file belongs to importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.arithmetic.settings import PRESETS, settings_of
from examples.preparing import main

if __name__ == "__main__":
    sys.exit(main(__doc__, "examples.arithmetic.building", PRESETS, settings_of, kept="examples.arithmetic.kept"))
