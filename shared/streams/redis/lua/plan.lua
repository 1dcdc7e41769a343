-- Write a step's plan. KEYS: scored stream, ledger, outstanding, state, consumed, plans
-- ARGV: consumer, step, version, plan, then (entry, deliveries, group id) of each claim.
-- Returns 'planned', 'refused' or 'fenced'.
local stream, ledger, outstanding, state, consumed, plans = unpack(KEYS)
local consumer, step, version, plan = unpack(ARGV, 1, 4)
local claims = after(4, ARGV)
if redis.call('HGET', state, 'trainer_owner') ~= consumer then return 'fenced' end
local standing = redis.call('HGET', plans, step)
if standing then return standing == plan and 'planned' or 'refused' end
local count = #claims / 3
for index = 0, count - 1 do
  local entry, deliveries, group_id = unpack(claims, 3 * index + 1, 3 * index + 3)
  if not holds(stream, entry, consumer, deliveries) or not redis.call('ZSCORE', outstanding, group_id) then
    return 'refused'
  end
end
redis.call('HSET', plans, step, plan)
for index = 0, count - 1 do
  local entry, _, group_id = unpack(claims, 3 * index + 1, 3 * index + 3)
  redis.call('XCLAIM', stream, GROUP, PLANNED, 0, entry, 'JUSTID')
  redis.call('ZREM', outstanding, group_id)
end
redis.call('HINCRBY', ledger, 'planned', string.format('%d', count))
redis.call('HINCRBY', consumed, version, string.format('%d', count))
return 'planned'
