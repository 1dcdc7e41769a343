#!/bin/sh
# The container's health check: health.sh PATH asks the service at the address that the entry point has noted. What is
# wrong is written, and `docker inspect` shows it. No proxy: the service is this container's own.
address=$(cat "${TMPDIR:-/tmp}/flotilla-address") || exit 1
curl --silent --show-error --fail-with-body --max-time 4 --noproxy '*' "http://$address:$FLOTILLA_PORT$1" || exit 1
