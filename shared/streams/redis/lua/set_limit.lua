-- Set or lift the bound on each stream's memory, and measure the streams.
-- KEYS: state, what was handed over with tasks, streams in order ... ARGV: most bytes, or '' for no bound. Returns the bytes of each stream.
if ARGV[1] == '' then
  redis.call('HDEL', KEYS[1], 'stream_bytes')
else
  redis.call('HSET', KEYS[1], 'stream_bytes', ARGV[1])
end
local sizes = {}
for index = 3, #KEYS do sizes[index - 2] = bytes_of(KEYS[index], index == 3 and KEYS[2] or nil) end
return sizes
