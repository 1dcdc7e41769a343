-- Give up what no surviving checkpoint contains and no replay makes again.
-- KEYS: scored stream, ledger, outstanding, state, consumed, plans, lineage.
-- ARGV: consumer, step of the checkpoint, counter, then the steps whose plans are given up ...
-- The groups of those plans wait again, as outstanding. Committed steps after the checkpoint are no lineage any more:
-- their groups, whose entries are gone, count as ended by the counter and no longer as trained.
-- Returns {groups that wait again, groups that were trained in vain}, or -1 if a later trainer took over. The same call
-- again returns the sum of both: its first answer may have been lost.
local stream, ledger, outstanding, state, consumed, plans, lineage = unpack(KEYS)
local consumer, checkpoint_step, counter = unpack(ARGV, 1, 3)
local steps = after(3, ARGV)
local call = table.concat(ARGV, ' ')
local checkpoint = tonumber(checkpoint_step)
if redis.call('HGET', state, 'trainer_owner') ~= consumer then return -1 end

-- Groups of a version that no publication has covered yet take no room in the budget any more.
local function unconsume(version, count)
  local field = string.format('%d', version)
  local left = redis.call('HGET', consumed, field)
  if not left then return end
  if tonumber(left) > count then
    redis.call('HINCRBY', consumed, field, string.format('%d', -count))
  else
    redis.call('HDEL', consumed, field)
  end
end

local waiting, lost = 0, 0
for _, step in ipairs(steps) do
  local encoded = redis.call('HGET', plans, step)
  if encoded then
    local plan = cmsgpack.unpack(encoded)
    for position, entry in ipairs(plan.entry_ids) do
      redis.call('XCLAIM', stream, GROUP, HANDED_BACK, 0, entry, 'JUSTID')
      redis.call('ZADD', outstanding, string.format('%d', plan.oldest_version),
        string.format('%d', plan.group_ids[position]))
    end
    redis.call('HDEL', plans, step)
    redis.call('HINCRBY', ledger, 'planned', string.format('%d', -#plan.entry_ids))
    unconsume(plan.version, #plan.entry_ids)
    waiting = waiting + #plan.entry_ids
  end
end

local next_id = tonumber(redis.call('HGET', state, 'next_group_id') or '0')
local trained = tonumber(redis.call('HGET', ledger, 'trained') or '0')
for _, step in ipairs(redis.call('HKEYS', lineage)) do
  if tonumber(step) > checkpoint then
    local plan = cmsgpack.unpack(redis.call('HGET', lineage, step))
    local count, tokens = 0, 0
    local counts = plan.token_counts or {}  -- a plan that an earlier release wrote has none
    for position, group in ipairs(plan.group_ids) do
      -- One that was recorded after the server forgot it, and has not come again, was never counted as trained.
      local is_known = group < next_id and not redis.call('ZSCORE', outstanding, string.format('%d', group))
      if is_known and trained > 0 then
        local sampled = counts[position] or math.floor(plan.token_count / #plan.group_ids)
        count_end(ledger, counter, sampled)
        count, tokens, trained = count + 1, tokens + sampled, trained - 1
      end
    end
    redis.call('HINCRBY', ledger, 'trained', string.format('%d', -count))
    redis.call('HINCRBY', ledger, 'tokens:trained', string.format('%d', -tokens))
    redis.call('HDEL', lineage, step)
    unconsume(plan.version, count)
    lost = lost + count
  end
end

if redis.call('HGET', state, 'rolled_back_by') ~= call then
  redis.call('HSET', state, 'rolled_back_by', call, 'rolled_back_waiting', 0, 'rolled_back_lost', 0)
end
return {
  redis.call('HINCRBY', state, 'rolled_back_waiting', waiting),
  redis.call('HINCRBY', state, 'rolled_back_lost', lost),
}
