-- Restart leases. KEYS: stream. ARGV: consumer, then (entry, deliveries) of each claim.
-- Returns the positions, from 1, of the claims that are lost.
local stream = unpack(KEYS)
local consumer = unpack(ARGV, 1, 1)
local claims = after(1, ARGV)
local lost = {}
for position = 1, #claims / 2 do
  local entry, deliveries = unpack(claims, 2 * position - 1, 2 * position)
  if holds(stream, entry, consumer, deliveries) then
    redis.call('XCLAIM', stream, GROUP, consumer, 0, entry, 'JUSTID')
  else
    lost[#lost + 1] = position
  end
end
return lost
