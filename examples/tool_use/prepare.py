"""Make everything the tool use example trains on: a tiny model that mostly guesses, and problems.

    python examples/tool_use/prepare.py --output DIR --seed 0

DIR appears complete or not at all. A second call with the same settings returns at once.
"""

import sys
from pathlib import Path

if not __package__:  # executed by path: make the package that this file belongs to importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.preparing import main
from examples.tool_use.settings import PRESETS, settings_of

if __name__ == "__main__":
    sys.exit(main(__doc__, "examples.tool_use.building", PRESETS, settings_of))
