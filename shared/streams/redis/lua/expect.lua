-- Say that an answer is expected, unless it is already; or only look.
-- KEYS: the letter. ARGV: key to sign with, milliseconds until the deadline or '' to look only, milliseconds that it is
-- kept after it. Returns key, milliseconds left, whether it was accepted, and the answer or false; nothing where it is
-- not expected.
local letter = unpack(KEYS, 1, 1)
local key, wanted, kept = unpack(ARGV, 1, 3)
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if redis.call('EXISTS', letter) == 0 then
  if wanted == '' then return {} end
  redis.call('HSET', letter, 'key', key, 'deadline', string.format('%d', now + tonumber(wanted)))
  redis.call('PEXPIRE', letter, string.format('%d', tonumber(wanted) + tonumber(kept)))
end
local found = redis.call('HMGET', letter, 'key', 'deadline', 'accepted', 'answer')
return {found[1], math.max(0, tonumber(found[2]) - now), found[3] and 1 or 0, found[4]}
