"""The container's health check: the service answers on its own address."""

import os
import socket
import sys
import urllib.request

host = os.environ.get("FLOTILLA_HOST") or socket.gethostbyname(socket.gethostname())
port = os.environ["FLOTILLA_PORT"]
with urllib.request.urlopen(f"http://{host}:{port}/healthz", timeout=3) as answer:
    sys.exit(0 if answer.status == 200 else 1)
