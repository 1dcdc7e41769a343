-- Claim entries that were delivered before and are free again.
-- KEYS: stream, ledger, outstanding, what was handed over with tasks [, the stream that claims are forwarded to]
-- ARGV: consumer, count, most deliveries, how many times as many whoever lost them, what the keys begin with that say
-- which claims of an entry were lost by holders who lived, state, lease in milliseconds or 'trainer' [, entries that the
-- trainer holds ...]. The state is read alone: were it one of KEYS, the server would ask for the right to write it.
--   lease: entries handed back, then entries idle for longer than the lease.
--   trainer: entries of every other consumer but the plans', then own entries whose delivery never arrived.
-- Returns {entries as {id, deliveries, fields}, number of entries given up}; 'full' if what is claimed could not be
-- forwarded, since the next stream has all the memory that it may; or 'fenced'.
local stream, ledger, outstanding, handed_over_key, next_stream = unpack(KEYS)
local consumer, count, most, times, lost_alive, state, lease = unpack(ARGV, 1, 7)
local held_by_trainer = after(7, ARGV)
local handed_over = has_any(handed_over_key)
count, most = tonumber(count), tonumber(most)
local taken, given_up = {}, 0

-- An entry's fields, with the tokens that it was handed over with.
local function whole(fields)
  if not handed_over then return fields end
  local group_id = string.format('%d', cmsgpack.unpack(fields[2]).group_id)
  local found = redis.call('HMGET', handed_over, group_id .. ':header', group_id)
  return found[1] and {'header', found[1], 'payload', found[2]} or fields
end

local function give_up(entry)
  local found = redis.call('XRANGE', stream, entry, entry)
  remove(stream, entry)
  if #found == 1 then
    local header = cmsgpack.unpack(whole(found[1][2])[2])
    local group_id = string.format('%d', header.group_id)
    count_end(ledger, 'failed:too_many_deliveries', header.token_count)
    redis.call('ZREM', outstanding, group_id)
    if handed_over then forget_tokens(handed_over, group_id) end
    tell_end(ledger, 1)
  end
  given_up = given_up + 1
end

local function is_tried_enough(entry, deliveries)
  if deliveries < most then return false end
  return deliveries >= most * tonumber(times) or deliveries - redis.call('SCARD', lost_alive .. entry) >= most
end

local function take(rows)
  for _, row in ipairs(rows) do
    local entry, deliveries = row[1], row[4]
    if is_tried_enough(entry, deliveries) then
      give_up(entry)
    else
      local claimed = redis.call('XCLAIM', stream, GROUP, consumer, 0, entry)
      if claimed[1] then
        taken[#taken + 1] = {entry, deliveries + 1, whole(claimed[1][2])}
      else
        redis.call('XACK', stream, GROUP, entry)
      end
    end
  end
end

if lease ~= 'trainer' then
  if next_stream and is_full(state, next_stream) then return 'full' end
  local rows = redis.pcall('XPENDING', stream, GROUP, '-', '+', count, HANDED_BACK)
  if is_no_group(rows) then return {taken, given_up} end
  take(rows)
  if #taken < count then
    take(redis.call('XPENDING', stream, GROUP, 'IDLE', lease, '-', '+', count - #taken))
  end
  return {taken, given_up}
end

if redis.call('HGET', state, 'trainer_owner') ~= consumer then return 'fenced' end
local summary = redis.pcall('XPENDING', stream, GROUP)
if is_no_group(summary) then return {taken, given_up} end
for _, holder in ipairs(summary[4] or {}) do
  if holder[1] ~= consumer and holder[1] ~= PLANNED and #taken < count then
    take(redis.call('XPENDING', stream, GROUP, '-', '+', count - #taken, holder[1]))
  end
end
if #held_by_trainer > 0 and #taken < count then
  local held = {}
  for _, entry in ipairs(held_by_trainer) do held[entry] = true end
  for _, each in ipairs(taken) do held[each[1]] = true end
  local strays = {}
  for _, row in ipairs(redis.call('XPENDING', stream, GROUP, '-', '+', 1000000, consumer)) do
    if not held[row[1]] and #strays < count - #taken then strays[#strays + 1] = row end
  end
  take(strays)
end
return {taken, given_up}
