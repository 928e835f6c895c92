-- ARGV: settings
-- Returns running, delayed, dead letters, submission time of the oldest waiting head ('' none),
-- the present time,
-- then per lane its name and number of waiting jobs.

local oldest

local function look(submitted)
  if submitted and (not oldest or submitted < oldest) then oldest = submitted end
end

-- An entry's number is the time at which it was added: for those at their first place, by submit.
local function submission_of(place, entry)
  if place == 'jobs' then return tonumber(string.match(entry[1], '%d+')) end
  local job = load(id_in(entry) or '')
  return job and tonumber(job.submitted)
end

-- Entries that no worker was given. The pending ones are exactly those under a lease.
local function undelivered(place, lane)
  local stream = K[place] .. lane
  local length = redis.pcall('XLEN', stream)
  if length == 0 or type(length) == 'table' then return 0 end
  local pending, delivered = 0, '0-0'
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    if group[2] == GROUP then pending, delivered = group[6], group[8] end
  end
  if length > pending then
    local head = redis.call('XRANGE', stream, '(' .. delivered, '+', 'COUNT', 1)[1]
    if head then look(submission_of(place, head)) end
  end
  return length - pending
end

local waiting, lanes = {}, {}
for _, lane in ipairs(redis.call('HKEYS', K.load)) do
  if lane ~= TOTAL then
    lanes[#lanes + 1] = lane
    waiting[lane] = undelivered('returned', lane) + undelivered('jobs', lane)
  end
end

-- A lapsed lease holds nothing: its job wants a worker.
for _, id in ipairs(redis.call('ZRANGEBYSCORE', K.leases, '-inf', NOW)) do
  local job = load(id)
  local lane = job and lane_of(job)
  if waiting[lane] then
    waiting[lane] = waiting[lane] + 1
    look(tonumber(job.submitted))
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
