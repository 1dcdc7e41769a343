-- Take groups that another experiment offers, against the budget; those that were taken before are left out.
-- KEYS: scored stream, ledger, outstanding, state, what was handed over with tasks, streams in order
-- ARGV: number that the offer reaches, limit, counters of the tokens that have come so far, counter of what is missing,
--   the life of this server, from before the offer was read, then of each group (number, id, header, payload, version,
--   grades, tokens)
-- Returns {number taken, number up to which everything was taken or missed, 1 if a stream is full}; 'restarted' if the
-- life is over: what is offered under these numbers since may be other groups.
local destination, ledger, outstanding, state, handed_over = unpack(KEYS, 1, 5)
local streams = after(5, KEYS)
local reached, limit, counters, missing, life = unpack(ARGV, 1, 5)
local parts = after(5, ARGV)
if is_past(life) then return 'restarted' end
reached, limit = tonumber(reached), tonumber(limit)
local through = tonumber(redis.call('HGET', state, 'taken_through') or '0')
for index, stream in ipairs(streams) do
  if is_full(state, stream, index == 1 and handed_over or nil) then return {0, through, 1} end
end
local used = redis.call('ZCARD', outstanding)
local count, missed, total, is_whole = 0, 0, 0, true
for index = 0, #parts / 7 - 1 do
  local number, group_id, header, payload, version, grades, tokens = unpack(parts, 7 * index + 1, 7 * index + 7)
  number = tonumber(number)
  if number > through then
    is_whole = used + count < limit
    if not is_whole then break end
    redis.call('XADD', destination, '*', 'header', header, 'payload', payload, 'grades', grades)
    redis.call('ZADD', outstanding, version, group_id)
    missed, total, count = missed + number - through - 1, total + tonumber(tokens), count + 1
    through = number
  end
end
if is_whole and reached > through then
  missed, through = missed + reached - through, reached
end
if count + missed == 0 then return {0, through, 0} end
redis.call('HSET', state, 'taken_through', string.format('%d', through))
redis.call('HINCRBY', ledger, 'issued', string.format('%d', count + missed))
for counter in string.gmatch(counters, '%S+') do
  redis.call('HINCRBY', ledger, counter, string.format('%d', total))
end
if missed > 0 then count_end(ledger, missing, 0, missed) end
return {count, through, 0}
