-- Remember that a claim was lost by a holder who lives: that delivery does not count towards giving the entry up.
-- KEYS: stream, the tokens of such claims of the entry. ARGV: entry, the claim's token, milliseconds to remember it.
-- Returns 1, or 0 if the entry has left the stream.
local stream, tokens = unpack(KEYS)
local entry, token, remember_ms = unpack(ARGV)
local rows = redis.pcall('XPENDING', stream, GROUP, entry, entry, 1)
if is_no_group(rows) then return 0 end
if rows.err then error(rows.err) end
if #rows == 0 then return 0 end
redis.call('SADD', tokens, token)
redis.call('PEXPIRE', tokens, remember_ms)
return 1
