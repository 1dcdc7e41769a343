-- Keep what is shared from now on for a subscriber. KEYS: what is shared. ARGV: the subscriber.
-- Returns the number up to which it has taken everything.
local shared = unpack(KEYS)
local name = unpack(ARGV)
local found = subscribers_of(shared)
if found[name] then return found[name] end
redis.call('XGROUP', 'CREATE', shared, name, '$', 'MKSTREAM')
return last_shared(shared)
