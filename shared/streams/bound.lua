-- Set or lift the bound on each stream's memory, and measure the streams. KEYS: state, streams ...
-- ARGV: most bytes, or '' for no bound. Returns the bytes of each stream.
if ARGV[1] == '' then
  redis.call('HDEL', KEYS[1], 'stream_bytes')
else
  redis.call('HSET', KEYS[1], 'stream_bytes', ARGV[1])
end
local sizes = {}
for index = 2, #KEYS do sizes[index - 1] = bytes_of(KEYS[index]) end
return sizes
