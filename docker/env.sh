#!/bin/sh
# Writes .env beside docker-compose.yml: the operator's token, one with which services register, and a password for Redis,
# readable by you alone. What is in a file that is there already stays: the data plane's password must not change under a
# fleet that runs.
set -eu
umask 077
cd "$(dirname "$0")/.."
secret() { od -An -tx1 -N32 /dev/urandom | tr -d ' \n'; }
if [ -e .env ]; then cp .env .env.new; else : >.env.new; fi
[ -z "$(tail -c1 .env.new)" ] || echo >>.env.new
for name in FLOTILLA_TOKEN FLOTILLA_SERVICE_TOKEN FLOTILLA_REDIS_PASSWORD; do
    grep -q "^$name=" .env.new || printf '%s=%s\n' "$name" "$(secret)" >>.env.new
done
if [ -e .env ] && cmp -s .env .env.new; then
    rm .env.new
    echo "$PWD/.env is kept as it is" >&2
    exit 0
fi
mv .env.new .env
