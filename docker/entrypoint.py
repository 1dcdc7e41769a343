"""The container's entry point: name the address to listen on and to register with, then become the service."""

import os
import sys
import tempfile
from pathlib import Path

from address import in_url, own_address

ADDRESS_FILE = "flotilla-address"

os.environ["FLOTILLA_HOST"] = host = own_address()
# The health check asks there, without an interpreter that would have to find it out again.
(Path(tempfile.gettempdir()) / ADDRESS_FILE).write_text(in_url(host), encoding="ascii")
os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606  an argument list, no shell
