#!/bin/sh
# Writes secrets/ beside docker-compose.yml, a file for each: the operator's token, one with which services register, the
# address of the data plane for each kind of service, with its user and password, and the list of these users for the
# server (docker/users.acl with digests of the passwords), and the password of its health check. The folder is for you alone; its files are readable for the
# users of the containers that they are mounted into. What is there already stays. Values that an earlier release kept in
# .env are taken from there, and out of it; its one password of the data plane is used no more.
set -eu
umask 077
cd "$(dirname "$0")/.."
mkdir -p secrets
chmod 700 secrets
secret() { od -An -tx1 -N32 /dev/urandom | tr -d ' \n'; }
earlier() { [ ! -e .env ] || sed -n "s/^$1=//p" .env; }
keep() { # FILE [VARIABLE]
    if [ ! -s "secrets/$1" ]; then
        value=
        [ -z "${2:-}" ] || value=$(earlier "$2")
        printf '%s' "${value:-$(secret)}" > "secrets/$1.new"
        mv "secrets/$1.new" "secrets/$1"
    fi
    chmod 644 "secrets/$1"
}
keep token FLOTILLA_TOKEN
keep service-token FLOTILLA_SERVICE_TOKEN
keep redis-health
user() { # NAME PASSWORD
    digest=$(printf '%s' "$2" | sha256sum | cut -d ' ' -f 1)
    sed "s/^\(user $1 on \)#[A-Z]*/\1#$digest/" secrets/redis-users.new > secrets/redis-users.newer
    mv secrets/redis-users.newer secrets/redis-users.new
}
cp docker/users.acl secrets/redis-users.new
user health "$(cat secrets/redis-health)"
for kind in gateway rollout reward trainer backup operator; do
    file=secrets/redis-url-$kind
    [ -s "$file" ] || printf 'redis://%s:%s@redis:6379/0' "$kind" "$(secret)" > "$file"
    user "$kind" "$(sed 's|^redis://[a-z]*:||; s|@redis:6379/0$||' "$file")"
    chmod 644 "$file"
done
# In place: a container that runs has this very file mounted.
cat secrets/redis-users.new > secrets/redis-users.acl
rm -f secrets/redis-users.new secrets/redis-password secrets/redis-url
chmod 644 secrets/redis-users.acl
if [ -e .env ] && grep -qE '^FLOTILLA_(TOKEN|SERVICE_TOKEN|REDIS_PASSWORD)=' .env; then
    sed -E '/^FLOTILLA_(TOKEN|SERVICE_TOKEN|REDIS_PASSWORD)=/d' .env > .env.new
    mv .env.new .env
fi
