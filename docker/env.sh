#!/bin/sh
# Writes secrets/ beside docker-compose.yml, a file for each: the operator's token, one with which services register, the
# data plane's password and its address with the password in it. The folder is for you alone; its files are readable for
# the users of the containers that they are mounted into. What is there already stays: the data plane's password must not
# change under a fleet that runs. Values that an earlier release kept in .env are taken from there, and out of it.
set -eu
umask 077
cd "$(dirname "$0")/.."
mkdir -p secrets
chmod 700 secrets
secret() { od -An -tx1 -N32 /dev/urandom | tr -d ' \n'; }
earlier() { [ ! -e .env ] || sed -n "s/^$1=//p" .env; }
keep() { # FILE VARIABLE
    if [ ! -s "secrets/$1" ]; then
        value=$(earlier "$2")
        printf '%s' "${value:-$(secret)}" > "secrets/$1.new"
        mv "secrets/$1.new" "secrets/$1"
    fi
    chmod 644 "secrets/$1"
}
keep token FLOTILLA_TOKEN
keep service-token FLOTILLA_SERVICE_TOKEN
keep redis-password FLOTILLA_REDIS_PASSWORD
printf 'redis://:%s@redis:6379/0' "$(cat secrets/redis-password)" > secrets/redis-url
chmod 644 secrets/redis-url
if [ -e .env ] && grep -qE '^FLOTILLA_(TOKEN|SERVICE_TOKEN|REDIS_PASSWORD)=' .env; then
    sed -E '/^FLOTILLA_(TOKEN|SERVICE_TOKEN|REDIS_PASSWORD)=/d' .env > .env.new
    mv .env.new .env
fi
