-- List who subscribes to what is shared. KEYS: what is shared. Returns name, number taken, ...
local shared = unpack(KEYS)
local listed = {}
for name, taken in pairs(subscribers_of(shared)) do
  listed[#listed + 1] = name
  listed[#listed + 1] = taken
end
return listed
