-- Note that a subscriber has everything up to a number, or is one no more; delete what all have.
-- KEYS: what is shared, state. ARGV: the subscriber, the number or '', the life in which that was read.
-- Returns 1, or 0 if it is no subscriber; 'restarted' if the life is over.
local shared, state = unpack(KEYS)
local name, number, life = unpack(ARGV)
if is_past(life) then return 'restarted' end
local found = subscribers_of(shared)
if not found[name] then return 0 end
if number == '' then
  redis.call('XGROUP', 'DESTROY', shared, name)
elseif tonumber(number) > found[name] then
  redis.call('XGROUP', 'SETID', shared, name, number .. '-0')
end
trim_shared(shared, state)
return 1
