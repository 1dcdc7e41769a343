-- Write the lineage of steps whose plans the server has forgotten. KEYS: state, plans, lineage.
-- ARGV: consumer, then (step, plan without its entries) of each. A plan that stands, or lineage that is there, is left.
-- Returns the number of steps that were written now, or -1 if a later trainer took over.
local state, plans, lineage = unpack(KEYS)
if redis.call('HGET', state, 'trainer_owner') ~= ARGV[1] then return -1 end
local written = 0
for index = 2, #ARGV, 2 do
  if redis.call('HEXISTS', plans, ARGV[index]) == 0 then
    written = written + redis.call('HSETNX', lineage, ARGV[index], ARGV[index + 1])
  end
end
return written
