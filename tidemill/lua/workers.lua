-- ARGV: settings
-- Returns per worker whose report has not expired: the report, and its age in ms.

local reply = {}
local listed = redis.call('ZRANGE', K.workers, '(' .. NOW, '+inf', 'BYSCORE', 'WITHSCORES')
for i = 1, #listed, 2 do
  local report = redis.pcall('GET', K.worker .. listed[i])
  if type(report) == 'string' then
    reply[#reply + 1] = report
    reply[#reply + 1] = C.worker_ttl - (listed[i + 1] - NOW)
  end
end
return reply
