-- Number the last group that was ever shared. KEYS: what is shared. Returns the number, and the server's life.
local shared = unpack(KEYS)
return {last_shared(shared), life_of_server()}
