-- Name the life of the server that has a key. KEYS: the key. Returns it.
local key = unpack(KEYS)
return life_of_server()
