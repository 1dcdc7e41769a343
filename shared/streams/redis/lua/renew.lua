-- Start leases anew. KEYS: stream. ARGV: consumer, then (entry, deliveries) of each claim.
-- Returns the positions, from 1, of the claims that are lost.
local lost = {}
for position = 1, (#ARGV - 1) / 2 do
  local entry, deliveries = ARGV[2 * position], ARGV[2 * position + 1]
  if holds(KEYS[1], entry, ARGV[1], deliveries) then
    redis.call('XCLAIM', KEYS[1], GROUP, ARGV[1], 0, entry, 'JUSTID')
  else
    lost[#lost + 1] = position
  end
end
return lost
