"""Run the command line: ``python -m flotilla``."""

import sys

from flotilla.cli.__main__ import main

sys.exit(main())
