-- Resolve the plans of steps that no checkpoint will ever contain. KEYS: scored stream, ledger, state, plans.
-- ARGV: consumer, counter, step ... Returns the number of groups that ended now, or -1 if a later trainer took over.
local stream, ledger, state, plans = unpack(KEYS)
local consumer, counter = unpack(ARGV, 1, 2)
local steps = after(2, ARGV)
if redis.call('HGET', state, 'trainer_owner') ~= consumer then return -1 end
local ended = 0
for _, step in ipairs(steps) do
  local encoded = redis.call('HGET', plans, step)
  if encoded then
    local entries = cmsgpack.unpack(encoded).entry_ids
    for _, entry in ipairs(entries) do
      local found = redis.call('XRANGE', stream, entry, entry)[1]
      remove(stream, entry)
      count_end(ledger, counter, found and cmsgpack.unpack(found[2][2]).token_count or 0)
    end
    redis.call('HDEL', plans, step)
    redis.call('HINCRBY', ledger, 'planned', string.format('%d', -#entries))
    ended = ended + #entries
  end
end
return ended
