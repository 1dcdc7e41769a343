-- Bring an answer to where it is expected; the first counts.
-- KEYS: the letter. ARGV: the answer. Returns taken, again, other, late or unknown.
local letter = unpack(KEYS, 1, 1)
local answer = unpack(ARGV, 1, 1)
local found = redis.call('HMGET', letter, 'deadline', 'answer')
if not found[1] then return 'unknown' end
if found[2] then return found[2] == answer and 'again' or 'other' end
local time = redis.call('TIME')
if time[1] * 1000 + math.floor(time[2] / 1000) >= tonumber(found[1]) then return 'late' end
redis.call('HSET', letter, 'answer', answer)
return 'taken'
