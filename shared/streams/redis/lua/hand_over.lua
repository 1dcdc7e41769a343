-- Give a task's claim up together with what was sampled of it: the entry waits to be claimed first, with these tokens.
-- KEYS: stream, the claim's marker, what was handed over
-- ARGV: entry, consumer, deliveries, group id, header, payload, marker's value, its milliseconds
-- Returns 1 if this claim did it, now or at an earlier call whose answer was lost; 0 if the claim is lost.
local stream, marker, handed_over = unpack(KEYS)
-- First, since the same consumer may hold the entry again, with the same delivery count.
if redis.call('GET', marker) == ARGV[7] then return 1 end
if not holds(stream, ARGV[1], ARGV[2], ARGV[3]) then return 0 end
-- Entries cannot be changed, and a new one would be the last of its stream.
redis.call('HSET', handed_over, ARGV[4], ARGV[6], ARGV[4] .. ':header', ARGV[5])
redis.call('SET', marker, ARGV[7], 'PX', ARGV[8])
put_aside(stream, HANDED_BACK, ARGV[1], ARGV[3])
return 1
