-- ARGV: settings
-- Returns running, delayed, dead letters, submission time of the oldest waiting head ('' none),
-- the present time,
-- then per lane its name and number of waiting jobs.

local oldest

local function look(id)
  local job = load(id)
  local submitted = job and tonumber(job.submitted)
  if submitted and (not oldest or submitted < oldest) then oldest = submitted end
end

-- Entries that no worker was given. The pending ones are exactly those under a lease.
local function undelivered(stream)
  local length = redis.pcall('XLEN', stream)
  if length == 0 or type(length) == 'table' then return 0 end
  local pending, delivered = 0, '0-0'
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    if group[2] == GROUP then pending, delivered = group[6], group[8] end
  end
  local head = redis.call('XRANGE', stream, '(' .. delivered, '+', 'COUNT', 1)[1]
  if head then look(head[2][2]) end
  return length - pending
end

local waiting, lanes = {}, {}
local load_of = redis.call('HGETALL', K.load)
for i = 1, #load_of, 2 do
  local lane = load_of[i]
  if lane ~= TOTAL then
    lanes[#lanes + 1] = lane
    waiting[lane] = undelivered(K.returned .. lane) + undelivered(K.jobs .. lane)
  end
end

-- A lapsed lease holds nothing: its job wants a worker.
for _, id in ipairs(redis.call('ZRANGEBYSCORE', K.leases, '-inf', NOW)) do
  local job = load(id)
  if job and waiting[lane_of(job)] then
    waiting[lane_of(job)] = waiting[lane_of(job)] + 1
    look(id)
  end
end

local reply = {
  redis.call('ZCOUNT', K.leases, '(' .. NOW, '+inf'), redis.call('ZCARD', K.delayed),
  redis.call('XLEN', K.dead), oldest and tostring(oldest) or '', tostring(NOW),
}
for _, lane in ipairs(lanes) do
  reply[#reply + 1] = lane
  reply[#reply + 1] = waiting[lane]
end
return reply
