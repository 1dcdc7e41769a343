-- Record a committed publication. KEYS: state, consumed. ARGV: version. Returns 1, or 0 if it is not newer.
local version = tonumber(ARGV[1])
local recorded = redis.call('HGET', KEYS[1], 'published_version')
if recorded and tonumber(recorded) >= version then return 0 end
redis.call('HSET', KEYS[1], 'published_version', ARGV[1])
for _, trained in ipairs(redis.call('HKEYS', KEYS[2])) do
  if tonumber(trained) < version then redis.call('HDEL', KEYS[2], trained) end
end
return 1
