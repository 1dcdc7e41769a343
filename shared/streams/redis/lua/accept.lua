-- Note that the other side has said that it will answer.
-- KEYS: the letter. Returns 1.
local letter = unpack(KEYS, 1, 1)
if redis.call('EXISTS', letter) == 1 then redis.call('HSET', letter, 'accepted', 1) end
return 1
