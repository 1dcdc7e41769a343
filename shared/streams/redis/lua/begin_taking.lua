-- Let taking begin behind a number. KEYS: state. ARGV: the number. Returns 1, or 0 if more was taken.
local state = unpack(KEYS)
local number = tonumber(unpack(ARGV))
if tonumber(redis.call('HGET', state, 'taken_through') or '0') >= number then return 0 end
redis.call('HSET', state, 'taken_through', string.format('%d', number))
return 1
