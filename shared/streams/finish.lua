-- Forward or resolve a claim: the only ways in which an entry leaves its stream, but for a committed plan.
-- KEYS: stream, ledger, outstanding, marker [, next stream]
-- ARGV: entry, consumer, deliveries, marker's milliseconds, counter, amount, group id [, header, payload]
-- Returns 1 if this claim did it, now or at an earlier call whose answer was lost; 0 if the claim is lost.
local stream, ledger, outstanding, marker, next_stream = unpack(KEYS)
local entry, consumer, deliveries, marker_ms, counter, amount, group_id, header, payload = unpack(ARGV)
if not holds(stream, entry, consumer, deliveries) then
  return redis.call('GET', marker) == counter and 1 or 0
end
if next_stream then
  redis.call('XADD', next_stream, '*', 'header', header, 'payload', payload)
else
  redis.call('ZREM', outstanding, group_id)
end
redis.call('HINCRBY', ledger, counter, amount)
remove(stream, entry)
redis.call('SET', marker, counter, 'PX', marker_ms)
return 1
