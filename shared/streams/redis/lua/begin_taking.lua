-- Let taking begin behind a number. KEYS: state. ARGV: the number, the life of this server, from before it was read.
-- Returns 1, or 0 if more was taken; 'restarted' if the life is over.
local state = unpack(KEYS)
local number, life = unpack(ARGV)
if is_past(life) then return 'restarted' end
number = tonumber(number)
if tonumber(redis.call('HGET', state, 'taken_through') or '0') >= number then return 0 end
redis.call('HSET', state, 'taken_through', string.format('%d', number))
return 1
