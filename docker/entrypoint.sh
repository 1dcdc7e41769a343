#!/bin/sh
# Listens on the container's own address: reachable from the fleet's network, and the address that it registers with.
set -eu
FLOTILLA_HOST="${FLOTILLA_HOST:-$(hostname -i | cut -d' ' -f1)}"
export FLOTILLA_HOST
exec "$@"
