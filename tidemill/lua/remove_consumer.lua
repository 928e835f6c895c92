-- ARGV: settings, worker
-- Returns 1 if nothing of the worker is left; a consumer with pending entries stays.

local worker = ARGV[2]
local clean = 1

local function remove(stream)
  local pending = redis.pcall('XPENDING', stream, GROUP, '-', '+', 1, worker)
  if pending.err then return end
  if #pending > 0 then
    clean = 0
  else
    redis.call('XGROUP', 'DELCONSUMER', stream, GROUP, worker)
  end
end

for _, lane in ipairs(redis.call('HKEYS', K.load)) do
  if lane ~= TOTAL then
    remove(K.returned .. lane)
    remove(K.jobs .. lane)
  end
end
if clean == 1 then
  redis.call('DEL', K.receipt .. worker, K.cancelled .. worker, K.worker .. worker)
  redis.call('ZREM', K.workers, worker)
end
return clean
