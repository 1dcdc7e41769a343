#!/bin/bash
# node.sh RANK NODES HEAD: what one of several machines runs of a fleet, for whatever starts the same command on all of them and
# tells each its number (SkyPilot, dstack, ssh in a loop).
#
#   machine 0                    data plane, gateway, rewards, and the trainer's first node
#   the first TRAINER_NODES      a node of the trainer, with all GPUs (parallelism.nodes of the spec)
#   the others                   a rollout for every ROLLOUT_GPUS of their GPUs, or one without any
#   a single machine             one of each; set FLOTILLA_DEVICES, or use `flotilla up`, which divides its GPUs
#
# FLOTILLA_TOKEN, FLOTILLA_SERVICE_TOKEN and REDIS_PASSWORD are the same on all machines. FLOTILLA_DATA is on a file system
# that machine 0 and all trainers share, unless TRAINER_NODES is 1. Whatever ends is started again, until this is told to end.
set -euo pipefail
RANK=$1 NODES=$2 HEAD=$3
PYTHON=${FLEET_PYTHON:-python}
TRAINER_NODES=${TRAINER_NODES:-1}
ROLLOUT_GPUS=${ROLLOUT_GPUS:-1}
REWARDS=${REWARDS:-1}
GATEWAY_PORT=${GATEWAY_PORT:-8470}
REDIS_PORT=${REDIS_PORT:-6379}
export FLOTILLA_DATA=${FLOTILLA_DATA:-$HOME/flotilla}
# The address of this machine on the way to machine 0.
FLOTILLA_HOST=${FLOTILLA_HOST:-$("$PYTHON" -c 'import socket, sys; s = socket.socket(type=socket.SOCK_DGRAM); s.connect((sys.argv[1], 9)); print(s.getsockname()[0])' "$HEAD")}
export FLOTILLA_HOST

# Secrets are files from here on, and in no other process's environment.
umask 077
PRIVATE=$(mktemp -d)
trap 'rm -rf "$PRIVATE"' EXIT
printf '%s' "$FLOTILLA_TOKEN" > "$PRIVATE/token"
printf '%s' "$FLOTILLA_SERVICE_TOKEN" > "$PRIVATE/service-token"
printf 'redis://:%s@%s:%s/0' "$REDIS_PASSWORD" "$HEAD" "$REDIS_PORT" > "$PRIVATE/redis-url"
printf 'requirepass %s\n' "$REDIS_PASSWORD" > "$PRIVATE/password.conf"
unset FLOTILLA_TOKEN FLOTILLA_SERVICE_TOKEN REDIS_PASSWORD
export FLOTILLA_GATEWAY_URL=http://$HEAD:$GATEWAY_PORT FLOTILLA_REDIS_URL_FILE=$PRIVATE/redis-url
export FLOTILLA_LOG_FORMAT=${FLOTILLA_LOG_FORMAT:-json} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}

PIDS=()
ENDING=''
keep() { # COMMAND...
    (
        trap 'trap - TERM; ENDING=1; kill -TERM $CHILD 2>/dev/null' TERM
        until [ "$ENDING" ]; do
            "$@" & CHILD=$!
            CODE=0
            wait $CHILD || CODE=$?
            while kill -0 $CHILD 2> /dev/null; do CODE=0; wait $CHILD || CODE=$?; done
            [ $CODE -ne 0 ] || break
            [ "$ENDING" ] || { echo "$* ended with code $CODE, and is started again" >&2; sleep 2; }
        done
    ) &
    PIDS+=($!)
}
service() { FLOTILLA_TOKEN_FILE=$PRIVATE/service-token keep "$PYTHON" -P -m "flotilla.services.$1"; }
end() { # the newest first: trainer and rollouts have work in hand, which gateway and data plane take
    local number
    for ((number = ${#PIDS[@]} - 1; number >= 0; number--)); do
        kill -TERM "${PIDS[$number]}" 2> /dev/null || true
        while kill -0 "${PIDS[$number]}" 2> /dev/null; do wait "${PIDS[$number]}" || true; done
    done
    exit 0
}
trap end TERM INT

if [ "$RANK" -eq 0 ]; then
    mkdir -p "$FLOTILLA_DATA/redis"
    keep "$("$PYTHON" -c 'from flotilla.cli.redis_server import find_server; print(find_server())')" \
        --bind "$FLOTILLA_HOST" --port "$REDIS_PORT" --dir "$FLOTILLA_DATA/redis" --appendonly yes --appendfsync everysec \
        --maxmemory-policy noeviction --include "$PRIVATE/password.conf"
    FLOTILLA_PORT=$GATEWAY_PORT FLOTILLA_TOKEN_FILE=$PRIVATE/token FLOTILLA_SERVICE_TOKEN_FILE=$PRIVATE/service-token \
        keep "$PYTHON" -P -m flotilla.services.gateway
    for ((number = 0; number < REWARDS; number++)); do service reward; done
fi
if [ "$RANK" -lt "$TRAINER_NODES" ]; then
    service trainer
fi
if [ "$RANK" -ge "$TRAINER_NODES" ] || [ "$NODES" -eq 1 ]; then
    mapfile -t GPUS < <(nvidia-smi --query-gpu=index --format=csv,noheader 2> /dev/null || true)
    if [ "${#GPUS[@]}" -eq 0 ] || [ "$NODES" -eq 1 ]; then
        service rollout
    else
        for ((first = 0; first + ROLLOUT_GPUS <= ${#GPUS[@]}; first += ROLLOUT_GPUS)); do
            FLOTILLA_DEVICES=$(IFS=,; echo "${GPUS[*]:$first:$ROLLOUT_GPUS}") service rollout
        done
    fi
fi
wait
