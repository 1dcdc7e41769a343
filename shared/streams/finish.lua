-- Forward or resolve claims: the only ways in which an entry leaves its stream, but for a committed plan.
-- KEYS: stream, ledger, outstanding, next stream (the stream itself when resolving), then the marker of each claim
-- ARGV: 'forward' or 'resolve', consumer, marker's milliseconds, counter, then for each claim:
--   entry, deliveries, amount, group id, header, payload; the last two are empty when resolving.
-- Each claim stands alone. Returns for each 1 if this claim did it, now or at an earlier call whose answer was lost;
-- 0 if the claim is lost.
local stream, ledger, outstanding, next_stream = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local is_forward, consumer, marker_ms, counter = ARGV[1] == 'forward', ARGV[2], ARGV[3], ARGV[4]
local answers, ended, is_ended, total = {}, {}, {}, 0
for index = 1, #KEYS - 4 do
  local marker, at = KEYS[4 + index], 6 * index - 1
  local entry = ARGV[at]
  if not is_ended[entry] and holds(stream, entry, consumer, ARGV[at + 1]) then
    if is_forward then
      redis.call('XADD', next_stream, '*', 'header', ARGV[at + 4], 'payload', ARGV[at + 5])
    else
      redis.call('ZREM', outstanding, ARGV[at + 3])
    end
    ended[#ended + 1], is_ended[entry] = entry, true
    redis.call('SET', marker, counter, 'PX', marker_ms)
    total = total + tonumber(ARGV[at + 2])
    answers[index] = 1
  else
    answers[index] = redis.call('GET', marker) == counter and 1 or 0
  end
end
if #ended > 0 then
  redis.call('XACK', stream, GROUP, unpack(ended))
  redis.call('XDEL', stream, unpack(ended))
end
if total > 0 then redis.call('HINCRBY', ledger, counter, string.format('%d', total)) end
return answers
