-- Age of the oldest entry of each stream that is neither planned nor ended, by the server's clock.
-- KEYS: streams ... Returns for each its milliseconds since it came, or -1 if there is none.
-- Entries are delivered in order: one that was delivered is older than every one that was not.
local streams = KEYS
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local function is_before(one, other)
  local first, second = tonumber(string.match(one, '^%d+')), tonumber(string.match(other, '^%d+'))
  if first ~= second then return first < second end
  return tonumber(string.match(one, '%d+$')) < tonumber(string.match(other, '%d+$'))
end

local function oldest_pending(stream, holders)
  local oldest
  for _, holder in ipairs(holders) do
    local rows = holder[1] ~= PLANNED and redis.call('XPENDING', stream, GROUP, '-', '+', 1, holder[1]) or {}
    if rows[1] and (not oldest or is_before(rows[1][1], oldest)) then oldest = rows[1][1] end
  end
  return oldest
end

local function last_delivered(stream)
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local facts = {}
    for index = 1, #group, 2 do facts[group[index]] = group[index + 1] end
    if facts.name == GROUP then return facts['last-delivered-id'] end
  end
end

local ages = {}
for index, stream in ipairs(streams) do
  local summary, oldest, start = redis.pcall('XPENDING', stream, GROUP), nil, '-'
  if not is_no_group(summary) then
    if summary.err then error(summary.err) end
    oldest = oldest_pending(stream, summary[4] or {})
    start = '(' .. last_delivered(stream)
  end
  if not oldest then
    local first = redis.call('XRANGE', stream, start, '+', 'COUNT', 1)[1]
    oldest = first and first[1]
  end
  ages[index] = oldest and math.max(0, now - tonumber(string.match(oldest, '^%d+'))) or -1
end
return ages
