-- End all claims of consumers that are dead: their entries are handed back, and each delivery counts.
-- KEYS: streams ... ARGV: consumers. Returns the number of claims.
local streams, consumers = KEYS, ARGV
local freed = 0
for _, stream in ipairs(streams) do
  local summary = redis.pcall('XPENDING', stream, GROUP)
  local held = {}
  if not is_no_group(summary) then
    if summary.err then error(summary.err) end
    for _, holder in ipairs(summary[4] or {}) do held[holder[1]] = tonumber(holder[2]) end
  end
  for _, consumer in ipairs(consumers) do
    if held[consumer] then
      for _, row in ipairs(redis.call('XPENDING', stream, GROUP, '-', '+', held[consumer], consumer)) do
        redis.call('XCLAIM', stream, GROUP, HANDED_BACK, 0, row[1], 'JUSTID')
        freed = freed + 1
      end
    end
  end
end
return freed
