#!/bin/sh
# The container's health check: health.sh PATH asks the service at the address that the entry point has noted. What is
# wrong is written, and `docker inspect` shows it. No proxy: the service is this container's own.
address=$(cat "${TMPDIR:-/tmp}/flotilla-address") || exit 1
path=$1
shift
scheme=http
if [ -n "${FLOTILLA_TLS_CERTIFICATE:-}" ]; then
    scheme=https
    # Whose certificate this is, is not in doubt on the way to oneself.
    set -- --insecure --cert "$FLOTILLA_TLS_CERTIFICATE" --key "$FLOTILLA_TLS_KEY"
fi
curl --silent --show-error --fail-with-body --max-time 4 --noproxy '*' "$@" "$scheme://$address:$FLOTILLA_PORT$path" || exit 1
