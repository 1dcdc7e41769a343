-- Resolve the plans of steps as trained. KEYS: scored stream, ledger, state, plans, lineage. ARGV: consumer, kept, step ...
-- The lineage of a step is deleted when another is written that is `kept` steps later.
-- Returns the number of plans that were resolved now, or -1 if a later trainer took over.
local stream, ledger, state, plans, lineage = unpack(KEYS)
local consumer, kept = unpack(ARGV, 1, 2)
local steps = after(2, ARGV)
if redis.call('HGET', state, 'trainer_owner') ~= consumer then return -1 end
local resolved = 0
for _, step in ipairs(steps) do
  local encoded = redis.call('HGET', plans, step)
  if encoded then
    local plan = cmsgpack.unpack(encoded)
    for _, entry in ipairs(plan.entry_ids) do remove(stream, entry) end
    redis.call('HINCRBY', ledger, 'planned', string.format('%d', -#plan.entry_ids))
    redis.call('HINCRBY', ledger, 'trained', string.format('%d', #plan.entry_ids))
    redis.call('HINCRBY', ledger, 'tokens:trained', string.format('%d', plan.token_count))
    plan.entry_ids = nil
    redis.call('HSET', lineage, step, cmsgpack.pack(plan))
    redis.call('HDEL', plans, step)
    redis.call('HDEL', lineage, string.format('%d', tonumber(step) - tonumber(kept)))
    resolved = resolved + 1
  end
end
return resolved
