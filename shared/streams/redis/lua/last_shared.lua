-- Number the last group that was ever shared. KEYS: what is shared.
local shared = unpack(KEYS)
return last_shared(shared)
