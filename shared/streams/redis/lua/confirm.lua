-- Note that a subscriber has everything up to a number, or is one no more; delete what all have.
-- KEYS: what is shared, state. ARGV: the subscriber, the number or ''. Returns 1, or 0 if it is no subscriber.
local shared, state = unpack(KEYS)
local name, number = unpack(ARGV)
local found = subscribers_of(shared)
if not found[name] then return 0 end
if number == '' then
  redis.call('XGROUP', 'DESTROY', shared, name)
elseif tonumber(number) > found[name] then
  redis.call('XGROUP', 'SETID', shared, name, number .. '-0')
end
trim_shared(shared, state)
return 1
