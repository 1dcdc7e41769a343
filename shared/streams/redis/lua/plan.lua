-- Write a step's plan. KEYS: scored stream, ledger, outstanding, state, consumed, plans
-- ARGV: consumer, step, version, plan, then (entry, deliveries, group id) of each claim.
-- Returns 'planned', 'refused' or 'fenced'.
local stream, ledger, outstanding, state, consumed, plans = unpack(KEYS)
local consumer, step, version, plan = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if redis.call('HGET', state, 'trainer_owner') ~= consumer then return 'fenced' end
local standing = redis.call('HGET', plans, step)
if standing then return standing == plan and 'planned' or 'refused' end
local count = (#ARGV - 4) / 3
for index = 0, count - 1 do
  local entry, deliveries, group_id = ARGV[5 + 3 * index], ARGV[6 + 3 * index], ARGV[7 + 3 * index]
  if not holds(stream, entry, consumer, deliveries) or not redis.call('ZSCORE', outstanding, group_id) then
    return 'refused'
  end
end
redis.call('HSET', plans, step, plan)
for index = 0, count - 1 do
  redis.call('XCLAIM', stream, GROUP, PLANNED, 0, ARGV[5 + 3 * index], 'JUSTID')
  redis.call('ZREM', outstanding, ARGV[7 + 3 * index])
end
redis.call('HINCRBY', ledger, 'planned', string.format('%d', count))
redis.call('HINCRBY', consumed, version, string.format('%d', count))
return 'planned'
