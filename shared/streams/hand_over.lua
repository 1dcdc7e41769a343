-- Give a task's claim up together with what was sampled of it: another entry, of the same task, takes its place.
-- KEYS: stream, the claim's marker. ARGV: entry, consumer, deliveries, header, payload, marker's value, its milliseconds
-- Returns 1 if this claim did it, now or at an earlier call whose answer was lost; 0 if the claim is lost.
local stream, marker = KEYS[1], KEYS[2]
if not holds(stream, ARGV[1], ARGV[2], ARGV[3]) then
  return redis.call('GET', marker) == ARGV[6] and 1 or 0
end
-- No consumer was given the new entry, so it waits: the ledger's sum stays what it was.
redis.call('XADD', stream, '*', 'header', ARGV[4], 'payload', ARGV[5])
redis.call('SET', marker, ARGV[6], 'PX', ARGV[7])
remove(stream, ARGV[1])
return 1
