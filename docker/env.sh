#!/bin/sh
# Writes .env beside docker-compose.yml: the fleet's token and a password for Redis, readable by you alone.
# A file that is there already is left as it is: the data plane's password must not change under a fleet that runs.
set -eu
umask 077
cd "$(dirname "$0")/.."
if [ -e .env ]; then
    echo "$PWD/.env is kept as it is" >&2
    exit 0
fi
secret() { od -An -tx1 -N32 /dev/urandom | tr -d ' \n'; }
printf 'FLOTILLA_TOKEN=%s\nFLOTILLA_REDIS_PASSWORD=%s\n' "$(secret)" "$(secret)" >.env.new
mv .env.new .env
