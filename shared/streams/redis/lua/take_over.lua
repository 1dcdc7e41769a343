-- Become the one trainer. KEYS: scored stream, state. ARGV: consumer, incarnation or ''.
-- Returns the number of the incarnation; of the recorded one, negative, if that has this number or a later one.
local stream, state = unpack(KEYS)
local consumer, wanted = unpack(ARGV)
local recorded = tonumber(redis.call('HGET', state, 'trainer_incarnation') or '0')
local is_again = redis.call('HGET', state, 'trainer_owner') == consumer
local incarnation = tonumber(wanted) or (is_again and recorded or recorded + 1)
if incarnation < recorded or (incarnation == recorded and not is_again) then return -recorded end
redis.call('HSET', state, 'trainer_incarnation', string.format('%d', incarnation), 'trainer_owner', consumer)
local summary = redis.pcall('XPENDING', stream, GROUP)
if is_no_group(summary) then return incarnation end
for _, holder in ipairs(summary[4] or {}) do
  if holder[1] ~= consumer and holder[1] ~= PLANNED and holder[1] ~= HANDED_BACK then
    for _, row in ipairs(redis.call('XPENDING', stream, GROUP, '-', '+', tonumber(holder[2]), holder[1])) do
      put_aside(stream, HANDED_BACK, row[1], row[4])
    end
  end
end
return incarnation
