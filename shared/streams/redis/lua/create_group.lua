-- Create the stream's consumer group from its beginning, if it is missing. KEYS: stream [, plans].
-- Should the group of a stream with plans be missing, planned entries must not be delivered again: every entry is
-- made pending, planned ones for the plans, others as handed back. Returns 1, or 0 if the group is there.
local stream, plans = unpack(KEYS)
local made = redis.pcall('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
if made.err then
  if string.find(made.err, 'BUSYGROUP', 1, true) then return 0 end
  error(made.err)
end
local planned = {}
for _, encoded in ipairs(plans and redis.call('HVALS', plans) or {}) do
  for _, entry in ipairs(cmsgpack.unpack(encoded).entry_ids) do planned[entry] = true end
end
if not next(planned) then return 1 end
while true do
  local read = redis.call('XREADGROUP', 'GROUP', GROUP, PLANNED, 'COUNT', 64, 'STREAMS', stream, '>')
  if not read then return 1 end
  for _, entry in ipairs(read[1][2]) do
    if not planned[entry[1]] then put_aside(stream, HANDED_BACK, entry[1], 1) end
  end
end
