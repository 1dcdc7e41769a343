#!/bin/sh
# One episode with curl and jq: agent.sh EXPERIMENT; FLOTILLA_TOKEN is that of the fleet, or one of the scope `agent`.
set -eu
gateway=${FLOTILLA_GATEWAY_URL:-http://127.0.0.1:8470}
json='Content-Type: application/json'

episode=$(curl -sf "$gateway/v1/experiments/$1/episodes" -H "Authorization: Bearer $FLOTILLA_TOKEN" -H "$json" -d '{"wait_seconds": 20}')
key=$(printf %s "$episode" | jq -r .key)
base=$(printf %s "$episode" | jq -r .base_url)
chat=$(printf %s "$episode" | jq -c '{model, messages: .task.messages}')

reply=$(curl -sf "$base/chat/completions" -H "Authorization: Bearer $key" -H "$json" -d "$chat")
printf %s "$reply" | jq -r '.choices[0].message.content'

answer=$(printf %s "$reply" | jq -r '.choices[0].message.content | split("####") | last | gsub("\\s"; "")')
reward=$([ "$answer" = "$(printf %s "$episode" | jq -r .task.label)" ] && echo 1 || echo 0)
curl -sf "$base/episodes/$(printf %s "$episode" | jq -r .episode_id)/complete" \
  -H "Authorization: Bearer $key" -H "$json" -d "{\"reward\": $reward}"
