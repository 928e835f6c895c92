-- ARGV: settings, worker, request, room, newest version understood, fingerprint
-- Returns a reply per job (see _leases.lua).

local worker, request, room, version = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local fingerprint = ARGV[6]

-- Leases ran on while the server was down: give their holders the time of one lease to renew.
local function started_lately()
  local uptime = string.match(redis.call('INFO', 'server'), 'uptime_in_seconds:(%d+)')
  return uptime * 1000 < C.lease
end

local function forget_consumer(stream, consumer)
  local pending = redis.pcall('XPENDING', stream, GROUP, '-', '+', 1, consumer)
  if not pending.err and #pending == 0 then
    redis.call('XGROUP', 'DELCONSUMER', stream, GROUP, consumer)
  end
end

-- The entry may be gone, or the group: what counts is the hash, so both are made again.
local function move_entry(job)
  local stream = stream_of(job)
  redis.pcall('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
  local moved = redis.call('XCLAIM', stream, GROUP, worker, 0, job.entry, 'FORCE', 'JUSTID')
  if #moved == 0 then
    set(job, {entry = redis.call('XADD', stream, '*', E.id, job.id)})
    redis.call('XCLAIM', stream, GROUP, worker, 0, job.entry, 'FORCE', 'JUSTID')
  end
end

local function delay(job)
  detach(job)
  set(job, {state = 'delayed', worker = false, entry = false, place = false})
  local wait = math.min(C.backoff * 2 ^ (number(job.failures) - 2), C.max_backoff)
  redis.call('ZADD', K.delayed, math.floor(NOW + wait), job.id)
  if job.deadline then redis.call('ZADD', K.deadlines, job.deadline, job.id) end
end

-- What is dropped for the second time led nowhere: else workers of two builds that both die of a job
-- could go on for ever, each with a progress that the other cannot use.
local function advanced(job)
  if number(job.tokens) <= number(job.base) then return false end
  return not (job.origin and foreign(job, fingerprint))
end

-- An attempt that advanced the checkpoint is no failure, nor is one that waited for its worker to have
-- nothing else. Any other is repeated at once the first time, then with growing delay, then not at all.
local function retry(job)
  local failed = job.alone ~= 'held' and not advanced(job)
  if failed then set(job, {failures = number(job.failures) + 1}) end
  if number(job.failures) >= C.max_attempts then
    bury(job)
  elseif failed and number(job.failures) >= 2 then
    delay(job)
  else
    move_entry(job)
    hand_over(job, worker, fingerprint)
    return reply_for(job)
  end
end

local function take(job)
  if job.cancel then return cancel(job) end
  if late(job) then return expire(job) end
  return retry(job)
end

-- A lease without a job: somebody, or an eviction, took the hash. Its entry is found by looking.
local function refuse_orphans()
  for _, lane in ipairs(redis.call('HKEYS', K.load)) do
    for _, place in ipairs({'returned', 'jobs'}) do
      local stream = K[place] .. lane
      local pending = redis.pcall('XPENDING', stream, GROUP, '-', '+', 1000)
      for _, item in ipairs(pending.err and {} or pending) do
        local entry = redis.call('XRANGE', stream, item[1], item[1])[1]
        if entry and not load(id_in(entry) or '') then refuse(lane, stream, entry) end
      end
    end
  end
end

local replies = answered('reclaim', worker, request)
if replies then return replies end

replies = {}
local lapsed = redis.call('ZRANGEBYSCORE', K.leases, '-inf', NOW, 'LIMIT', 0, room * 4 + 100)
if #lapsed > 0 and started_lately() then lapsed = {} end
if #lapsed > 0 and overdrawn() then return OVERDRAWN end
local orphans = false
for _, id in ipairs(lapsed) do
  if #replies >= room then break end
  local job = load(id)
  if not job or job.state ~= 'running' then
    redis.call('ZREM', K.leases, id)
    orphans = true
  elseif tonumber(job.version) <= version then
    local stream, holder = stream_of(job), job.worker
    local reply = take(job)
    if holder ~= worker then forget_consumer(stream, holder) end
    if reply then replies[#replies + 1] = reply end
    if reply and is_last(reply) then break end
  end
end
if orphans then refuse_orphans() end
remember('reclaim', worker, request, replies)
return replies
