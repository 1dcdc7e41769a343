-- Note that none of another experiment's groups below an id comes any more. KEYS: state. ARGV: the id.
-- Returns the highest that was noted.
local state = unpack(KEYS)
local lowest = tonumber(unpack(ARGV))
lowest = math.max(lowest, tonumber(redis.call('HGET', state, 'lowest_to_come') or '0'))
redis.call('HSET', state, 'lowest_to_come', string.format('%d', lowest))
return lowest
