"""The container's entry point: name the address to listen on and to register with, then become the service."""

import os
import sys

from address import own_address

os.environ["FLOTILLA_HOST"] = own_address()
os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606  an argument list, no shell
