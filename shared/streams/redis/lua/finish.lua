-- Forward or resolve claims: the only ways in which an entry leaves its stream, but for a committed plan.
-- KEYS: stream, ledger, outstanding, next stream (the stream itself when resolving), what was handed over with tasks,
--   what is shared with subscribers (the stream itself where nothing is), then the marker of each claim, then markers of
--   earlier ones, whose answers have arrived: they are forgotten
-- ARGV: 'forward' or 'resolve', consumer, marker's milliseconds, counter, lowest entry, highest entry,
--   state (read alone: were it one of KEYS, the server would ask for the right to write it),
--   msgpack of a list of entry, deliveries, tokens, group id, number of the payload, header, grades for each claim,
--   then payloads. The number is -1 where the same transaction has just appended the new entry to the next stream:
--   it is taken away again unless the claim is held. Nothing of this has a meaning when resolving. The counter grows by
--   the tokens or, when resolving, by the groups. One list, since each further argument costs client and server more
--   than its bytes.
-- Each claim stands alone. Returns for each 1 if this claim did it, now or at an earlier call whose answer was lost;
-- 0 if the claim is lost.
local stream, ledger, outstanding, next_stream, handed_over_key, shared = unpack(KEYS, 1, 6)
local markers = after(6, KEYS)
local mode, consumer, marker_ms, counter, lowest, highest, state, encoded_claims = unpack(ARGV, 1, 8)
local payloads = after(8, ARGV)
local is_forward, claims = mode == 'forward', cmsgpack.unpack(encoded_claims)
local number = #claims / 7
local handed_over = has_any(handed_over_key)

-- What the consumer holds between the lowest and the highest entry: one look for all of them.
local most = number == 1 and 1 or number + 64
local rows = redis.pcall('XPENDING', stream, GROUP, lowest, highest, most, consumer)
if is_no_group(rows) then rows = {} end
if rows.err then error(rows.err) end
local held = {}
for _, row in ipairs(rows) do held[row[1]] = row[4] end
local may_hold_more = number > 1 and #rows == most

local function is_held(entry, deliveries)
  if held[entry] == deliveries then return true end
  return may_hold_more and held[entry] == nil and holds(stream, entry, consumer, deliveries)
end

local function take_away_last()
  redis.call('XDEL', next_stream, redis.call('XREVRANGE', next_stream, '+', '-', 'COUNT', 1)[1][1])
end

local has_subscribers = false
if shared ~= stream then
  local _, lowest = subscribers_of(shared)
  has_subscribers = lowest ~= nil
end

local function share(header, payload, grades)
  local number = string.format('%d-0', last_shared(shared) + 1)
  redis.call('XADD', shared, number, 'header', header, 'payload', payload, 'grades', grades)
end

local function share_last()
  local fields = facts_of(redis.call('XREVRANGE', next_stream, '+', '-', 'COUNT', 1)[1][2])
  share(fields['header'], fields['payload'], fields['grades'])
end

local answers, ended, total = {}, {}, 0
for index = 1, number do
  local marker = markers[index]
  local entry, deliveries, tokens, group_id, payload, header, grades = unpack(claims, 7 * index - 6, 7 * index)
  if is_held(entry, deliveries) then
    if is_forward and payload > 0 then
      redis.call('XADD', next_stream, '*', 'header', header, 'payload', payloads[payload], 'grades', grades)
      if has_subscribers then share(header, payloads[payload], grades) end
    elseif not is_forward then
      redis.call('ZREM', outstanding, group_id)
      count_end(ledger, counter, tokens)
    elseif has_subscribers then
      share_last()
    end
    -- The same claim may come twice in one call: it counts once.
    ended[#ended + 1], held[entry] = entry, false
    if handed_over then forget_tokens(handed_over, group_id) end
    redis.call('SET', marker, counter, 'PX', marker_ms)
    total = total + tokens
    answers[index] = 1
  else
    if is_forward and payload < 0 then take_away_last() end
    answers[index] = redis.call('GET', marker) == counter and 1 or 0
  end
end
if #markers > number then redis.call('DEL', unpack(markers, number + 1)) end
if #ended > 0 then
  redis.call('XACK', stream, GROUP, unpack(ended))
  redis.call('XDEL', stream, unpack(ended))
  if not is_forward then tell_end(ledger, #ended) end
end
if has_subscribers and #ended > 0 then trim_shared(shared, state) end
if is_forward and total > 0 then redis.call('HINCRBY', ledger, counter, string.format('%d', total)) end
return answers
