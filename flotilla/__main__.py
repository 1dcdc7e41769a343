"""Run the command line: ``python -m flotilla``."""

import sys
from pathlib import Path

if not sys.flags.safe_path:
    # ``python -m`` puts the working directory first: a folder ``shared`` or ``services`` there must not stand for ours.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from flotilla.cli.__main__ import main

sys.exit(main())
