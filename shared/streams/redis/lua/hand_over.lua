-- Give a task's claim up together with what was sampled of it: the entry waits to be claimed first, with these tokens.
-- KEYS: stream, the claim's marker, what was handed over
-- ARGV: entry, consumer, deliveries, group id, header, payload, marker's value, its milliseconds
-- Returns 1 if this claim did it, now or at an earlier call whose answer was lost; 0 if the claim is lost.
local stream, marker, handed_over = unpack(KEYS)
local entry, consumer, deliveries, group_id, header, payload, done, marker_ms = unpack(ARGV)
-- First, since the same consumer may hold the entry again, with the same delivery count.
if redis.call('GET', marker) == done then return 1 end
if not holds(stream, entry, consumer, deliveries) then return 0 end
-- Entries cannot be changed, and a new one would be the last of its stream.
redis.call('HSET', handed_over, group_id, payload, group_id .. ':header', header)
redis.call('SET', marker, done, 'PX', marker_ms)
put_aside(stream, HANDED_BACK, entry, deliveries)
return 1
