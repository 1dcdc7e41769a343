-- What several scripts share; put before each of them.
-- A script names all of its KEYS and ARGV in its first lines, and knows no positions after that; `after` gives the rest
-- of a list. The comment at its head says what they are, in that order, and what it returns.
-- Scripts are not rolled back when they fail, so each checks everything before its first write. A server whose memory
-- is full refuses a script's first write if it needs memory, and later ones never: so a script that frees memory
-- begins with that, and runs, and one that needs memory is refused before it has changed anything.

local GROUP, HANDED_BACK, PLANNED = 'hop', 'handed-back', 'planned'

-- What follows the first `count` of KEYS or ARGV. Not by `unpack`, whose results are limited in number.
local function after(count, list)
  local rest = {}
  for index = count + 1, #list do rest[index - count] = list[index] end
  return rest
end

local function is_no_group(answer)
  return type(answer) == 'table' and answer.err and string.find(answer.err, 'NOGROUP', 1, true)
end

-- Is the entry pending for this consumer, at this delivery count?
local function holds(stream, entry, consumer, deliveries)
  local rows = redis.pcall('XPENDING', stream, GROUP, entry, entry, 1)
  if is_no_group(rows) then return false end
  if rows.err then error(rows.err) end
  return #rows == 1 and rows[1][2] == consumer and rows[1][4] == tonumber(deliveries)
end

local function remove(stream, entry)
  redis.call('XACK', stream, GROUP, entry)
  redis.call('XDEL', stream, entry)
end

-- Count the end of a group, or of `number` alike, and unless it was trained its length: in the bucket of the lowest
-- power of two that is not below the tokens sampled of it. Nothing else counts an end with a reason, so both numbers
-- agree at any time.
local function count_end(ledger, counter, tokens, number)
  local ended = string.format('%d', number or 1)
  redis.call('HINCRBY', ledger, counter, ended)
  if not string.find(counter, ':', 1, true) then return end
  local bucket = math.min(tokens, 1)
  while bucket < tokens do bucket = bucket * 2 end
  redis.call('HINCRBY', ledger, 'length:' .. counter .. ':' .. string.format('%d', bucket), ended)
end

-- Tell the feeder, on the channel `ends`, how many groups have ended and left room. It looks now and then even if nobody
-- tells it: where the server lets this user publish nothing, that is no error.
local function tell_end(ledger, number)
  redis.pcall('PUBLISH', (string.gsub(ledger, 'ledger$', 'ends')), string.format('%d', number))
end

-- Give a pending entry to a reserved consumer; the delivery that ends so does not count.
local function put_aside(stream, consumer, entry, deliveries)
  redis.call('XCLAIM', stream, GROUP, consumer, 0, entry,
    'RETRYCOUNT', math.max(0, tonumber(deliveries) - 1), 'JUSTID')
end

-- The key, if there is anything in it; else nil.
local function has_any(key)
  return redis.call('EXISTS', key) == 1 and key or nil
end

-- A task's group has moved on or ended: nobody continues the tokens that it was handed over with.
local function forget_tokens(handed_over, group_id)
  redis.call('HDEL', handed_over, group_id, group_id .. ':header')
end

-- A stream's memory, estimated from a few of its nodes; without entries there is nothing to estimate.
local function bytes_of(stream, handed_over)
  local beside = handed_over and redis.call('MEMORY', 'USAGE', handed_over, 'SAMPLES', 16) or 0
  if redis.call('XLEN', stream) == 0 then return beside end
  return redis.call('MEMORY', 'USAGE', stream, 'SAMPLES', 16) + beside
end

-- What XINFO says of a stream or a group, by name; nothing of a key that is not there.
local function facts_of(answer)
  local facts = {}
  for index = 1, #answer, 2 do facts[answer[index]] = answer[index + 1] end
  return facts
end

-- Which of the server's lives this is: each start begins one, perhaps at an earlier state. '' where it does not say it.
local function life_of_server()
  local told = redis.pcall('INFO', 'server')
  return type(told) == 'string' and string.match(told, 'run_id:(%w+)') or ''
end

-- Has the server begun another life since something was read? What was not read in one, of life '', always counts.
local function is_past(life)
  return life ~= '' and life_of_server() ~= life
end

local function number_of(entry)
  return tonumber(string.match(entry, '^%d+'))
end

-- Number of the last group that was ever shared; 0 without one.
local function last_shared(shared)
  if redis.call('EXISTS', shared) == 0 then return 0 end
  return number_of(facts_of(redis.call('XINFO', 'STREAM', shared))['last-generated-id'])
end

-- Positions of those who subscribe to what is shared, by name, and the lowest; nil where nobody does.
local function subscribers_of(shared)
  if redis.call('EXISTS', shared) == 0 then return {}, nil end
  local found, lowest = {}, nil
  for _, each in ipairs(redis.call('XINFO', 'GROUPS', shared)) do
    local group = facts_of(each)
    local taken = number_of(group['last-delivered-id'])
    found[group['name']] = taken
    lowest = math.min(lowest or taken, taken)
  end
  return found, lowest
end

-- Does the stream take more memory than the experiment allows? What was handed over counts for the tasks.
local function is_full(state, stream, handed_over)
  local bound = redis.call('HGET', state, 'stream_bytes')
  return bound and bytes_of(stream, handed_over) > tonumber(bound)
end

-- Delete what everybody has taken of what is shared and, of what is left, the oldest that there is no memory for.
local function trim_shared(shared, state)
  local _, lowest = subscribers_of(shared)
  if not lowest then
    if redis.call('EXISTS', shared) == 1 then redis.call('XTRIM', shared, 'MAXLEN', '=', 0) end
    return
  end
  redis.call('XTRIM', shared, 'MINID', '=', string.format('%d-0', lowest + 1))
  while is_full(state, shared) do
    local length = redis.call('XLEN', shared)
    redis.call('XTRIM', shared, 'MAXLEN', '=', string.format('%d', length - math.ceil(length / 8)))
  end
end
