"""Make everything the frozen lake example trains on: a tiny model that stumbles, and the seeds of its lakes.

    python examples/frozen_lake/prepare.py --output DIR --seed 0

DIR appears complete or not at all. A second call with the same settings returns at once.
"""

import sys
from pathlib import Path

if not __package__:  # executed by path: make the package that this file belongs to importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.frozen_lake.settings import PRESETS, settings_of
from examples.preparing import main

if __name__ == "__main__":
    sys.exit(main(__doc__, "examples.frozen_lake.building", PRESETS, settings_of))
