-- Set or lift the bound on each stream's memory, and measure the streams.
-- KEYS: state, what was handed over with tasks, streams in order ...
-- ARGV: most bytes, or '' for no bound. Returns the bytes of each stream.
local state, handed_over = unpack(KEYS, 1, 2)
local streams = after(2, KEYS)
local bound = unpack(ARGV)
if bound == '' then
  redis.call('HDEL', state, 'stream_bytes')
else
  redis.call('HSET', state, 'stream_bytes', bound)
end
local sizes = {}
for index, stream in ipairs(streams) do sizes[index] = bytes_of(stream, index == 1 and handed_over or nil) end
return sizes
