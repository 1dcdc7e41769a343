"""The container's health check: ``health.py PATH`` asks the service at the container's own address."""

import os
import sys
import urllib.error
import urllib.request

from address import own_address

TIMEOUT_SECONDS = 4.0


def url_of(host: str, port: str, path: str) -> str:
    """Make the URL; an IPv6 address is put into brackets."""
    return f"http://[{host}]:{port}{path}" if ":" in host else f"http://{host}:{port}{path}"


def main() -> int:
    """Ask; write what is wrong, which `docker inspect` then shows."""
    url = url_of(own_address(), os.environ["FLOTILLA_PORT"], sys.argv[1])
    # No proxy: the service is this container's own.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=TIMEOUT_SECONDS) as answer:
            return 0 if answer.status == 200 else 1
    except urllib.error.HTTPError as error:
        sys.stderr.write(f"{error.code}: {error.read(500).decode('utf-8', 'replace')}\n")
    except OSError as error:
        sys.stderr.write(f"{url} does not answer: {error}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
