-- Name the consumers that hold claims. KEYS: streams ... Returns each name once for each stream.
local streams = KEYS
local names = {}
for _, stream in ipairs(streams) do
  local summary = redis.pcall('XPENDING', stream, GROUP)
  if not is_no_group(summary) then
    if summary.err then error(summary.err) end
    for _, holder in ipairs(summary[4] or {}) do
      if holder[1] ~= HANDED_BACK and holder[1] ~= PLANNED then names[#names + 1] = holder[1] end
    end
  end
end
return names
