-- Number the last group that was ever shared. KEYS: what is shared. Returns the number.
local shared = unpack(KEYS)
return last_shared(shared)
