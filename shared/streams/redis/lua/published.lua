-- Record a committed publication. KEYS: state, consumed. ARGV: version. Returns 1, or 0 if it is not newer.
local state, consumed = unpack(KEYS)
local version = tonumber(unpack(ARGV))
local recorded = redis.call('HGET', state, 'published_version')
if recorded and tonumber(recorded) >= version then return 0 end
redis.call('HSET', state, 'published_version', string.format('%d', version))
for _, trained in ipairs(redis.call('HKEYS', consumed)) do
  if tonumber(trained) < version then redis.call('HDEL', consumed, trained) end
end
return 1
