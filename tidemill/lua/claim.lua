-- ARGV: settings, worker, request, room, newest version understood, fingerprint, then the priorities
--       to serve
-- Returns a reply per job (see _leases.lua).

local worker, request, room, version = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local fingerprint, HIGHEST = ARGV[6], 7

-- Bounds the time that one call keeps the server busy with what is not a claimable job.
local patience = room + 200

local function promote()
  local due = redis.call('ZRANGEBYSCORE', K.delayed, '-inf', NOW, 'LIMIT', 0, 100)
  for _, id in ipairs(due) do
    redis.call('ZREM', K.delayed, id)
    local job = load(id)
    if job and job.state == 'delayed' then enqueue(job, 'returned') end
  end
end

-- Id of the first entry that no worker was given yet.
local function head(stream)
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  if groups.err then return nil end
  local delivered = '0-0'
  for _, group in ipairs(groups) do
    if group[2] == GROUP then delivered = group[8] end
  end
  local entries = redis.call('XRANGE', stream, '(' .. delivered, '+', 'COUNT', 1)
  return entries[1] and entries[1][1]
end

-- When the lane's next job began to wait; nil if none does.
local function since(lane)
  local first
  for _, place in ipairs({'returned', 'jobs'}) do
    local entry = head(K[place] .. lane)
    local ms = entry and tonumber(string.match(entry, '%d+'))
    if ms and (not first or ms < first) then first = ms end
  end
  return first
end

-- The tenant of a priority that was served least, and whose jobs this worker understands.
local function least_served(priority)
  local best
  for written = 1, version do
    local kind = written .. ':' .. priority
    local head = redis.call('ZRANGE', K.active .. kind, 0, 0, 'WITHSCORES')
    local tenant, service = head[1], tonumber(head[2])
    if tenant and (not best or service < best.service) then
      best = {
        priority = priority, tenant = tenant, service = service,
        active = K.active .. kind, lane = kind .. ':' .. tenant,
      }
    end
  end
  return best
end

local function idle(candidate) redis.call('ZREM', candidate.active, candidate.tenant) end

-- Priority first, but each span of `ageing` counts as one step up; among equals, who waits longest.
local function choose()
  local best
  for rank = HIGHEST, #ARGV do
    local candidate = least_served(ARGV[rank])
    if candidate then
      candidate.since = since(candidate.lane)
      if not candidate.since then
        -- All its jobs are with workers or delayed, so this happens no oftener than jobs are claimed.
        idle(candidate)
        return choose()
      end
      candidate.rank = math.max(HIGHEST, rank - math.floor((NOW - candidate.since) / C.ageing))
      if not best or candidate.rank < best.rank
        or (candidate.rank == best.rank and candidate.since < best.since) then
        best = candidate
      end
    end
  end
  return best
end

local function read(stream)
  return redis.pcall('XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', 1, 'STREAMS', stream, '>')
end

-- Next undelivered entry of a stream. A missing group begins at 0: nothing may be skipped.
local function next_entry(stream)
  if redis.call('EXISTS', stream) == 0 then return nil end
  local reply = read(stream)
  if reply and reply.err and string.find(reply.err, 'NOGROUP', 1, true) then
    redis.call('XGROUP', 'CREATE', stream, GROUP, '0')
    reply = read(stream)
  end
  if not reply or reply.err then return nil end
  return reply[1][2][1]
end

local function take(lane, stream, entry)
  local id = id_in(entry)
  local job = id and load(id)
  if not job then return refuse(lane, stream, entry) end
  local own = job.entry == entry[1] and stream_of(job) == stream
  if own and job.state == 'running' then
    -- Delivered again because the group was lost: its holder keeps it.
    redis.call('XCLAIM', stream, GROUP, job.worker, 0, entry[1], 'JUSTID')
  elseif not own or job.state ~= 'waiting' then
    drop(stream, entry[1])
  elseif not payload_of(job) then
    close(job, 'claim', 'failed', 'undecodable', 'the job has lost its payload')
  elseif late(job) then
    expire(job)
  else
    hand_over(job, worker, fingerprint)
    return reply_for(job)
  end
  return nil
end

local function serve(candidate)
  for _, place in ipairs({'returned', 'jobs'}) do
    local stream = K[place] .. candidate.lane
    local entry = next_entry(stream)
    if entry then return take(candidate.lane, stream, entry) end
  end
  idle(candidate)
end

-- In Redis's own words, so that whoever asks takes it for what it is.
local OVERDRAWN = {err = 'OOM jobs are handed out again when there is less memory in use'}

local replies = answered('claim', worker, request)
if replies then return replies end

promote()
expire_waiting(100)
replies = {}
while #replies < room and patience > 0 do
  patience = patience - 1
  local candidate = choose()
  if not candidate then break end
  if not may_hand_out(#replies) then
    if #replies == 0 then return OVERDRAWN end
    break
  end
  local reply = serve(candidate)
  if reply then
    set_clock(candidate.priority, candidate.lane)
    replies[#replies + 1] = reply
    if is_last(reply) then break end
  end
end
remember('claim', worker, request, replies)
return replies
