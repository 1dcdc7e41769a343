-- Forget consumers that hold nothing and were silent for long: every process leaves one behind. KEYS: streams.
-- ARGV: milliseconds of silence. Returns how many were forgotten. One that speaks again is made again by its command.
local streams = KEYS
local silent_ms = tonumber(unpack(ARGV))
local forgotten = 0
for _, stream in ipairs(streams) do
  local consumers = redis.pcall('XINFO', 'CONSUMERS', stream, GROUP)
  if not consumers.err then
    for _, row in ipairs(consumers) do
      local facts = {}
      for index = 1, #row, 2 do facts[row[index]] = row[index + 1] end
      local is_ours = facts.name == HANDED_BACK or facts.name == PLANNED
      if not is_ours and facts.pending == 0 and facts.idle > silent_ms then
        redis.call('XGROUP', 'DELCONSUMER', stream, GROUP, facts.name)
        forgotten = forgotten + 1
      end
    end
  end
end
return forgotten
