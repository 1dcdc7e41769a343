-- Write the lineage of steps whose plans the server has forgotten. KEYS: state, plans, lineage.
-- ARGV: consumer, then (step, plan without its entries) of each. A plan that stands, or lineage that is there, is left.
-- Returns the number of steps that were written now, or -1 if a later trainer took over.
local state, plans, lineage = unpack(KEYS)
local consumer = unpack(ARGV, 1, 1)
local steps = after(1, ARGV)
if redis.call('HGET', state, 'trainer_owner') ~= consumer then return -1 end
local written = 0
for index = 1, #steps, 2 do
  local step, plan = unpack(steps, index, index + 1)
  if redis.call('HEXISTS', plans, step) == 0 then
    written = written + redis.call('HSETNX', lineage, step, plan)
  end
end
return written
