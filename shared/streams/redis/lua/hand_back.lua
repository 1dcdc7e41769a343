-- Give a claim up. KEYS: stream. ARGV: entry, consumer, deliveries. Returns 1, or 0 if the claim is lost.
local stream = unpack(KEYS)
local entry, consumer, deliveries = unpack(ARGV)
if not holds(stream, entry, consumer, deliveries) then return 0 end
put_aside(stream, HANDED_BACK, entry, deliveries)
return 1
