-- ARGV: settings, worker, request, room, newest version understood, fingerprint
-- Returns a reply per job (see _leases.lua).

local worker, request, room, version = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local fingerprint = ARGV[6]

-- When somebody first looked at this server, where another one had been before it: the data were loaded by
-- then, which its uptime does not tell, or handed to a replica, which may be as old as it likes. 0 for the
-- first one.
local function server_since(info)
  local run_id = string.match(info, 'run_id:(%x+)') or ''
  local since = redis.call('HGET', K.server, run_id)
  if not since then
    since = redis.call('EXISTS', K.server) * NOW
    redis.call('DEL', K.server)
    redis.call('HSET', K.server, run_id, since)
  end
  redis.call('PEXPIRE', K.server, math.max(C.lease, C.result_ttl))
  return tonumber(since)
end

-- Leases ran on while the server was down: give their holders the time of one lease to renew.
local function started_lately()
  local info = redis.call('INFO', 'server')
  local uptime = (string.match(info, 'uptime_in_seconds:(%d+)') - 1) * 1000 -- it counts seconds that have begun
  return math.min(uptime, NOW - server_since(info)) < C.lease
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
-- nothing else.
local function failed(job) return job.alone ~= 'held' and not advanced(job) end

-- Only what ran alone has surely brought its worker down itself, whatever number of attempts this worker and
-- its holder were set; unless there is to be but one.
local function is_used_up(job) return job.alone == 'begun' or C.max_attempts == 1 end

-- A failed attempt is repeated at once the first time, then with growing delay, then not at all. On a server
-- that is too full to hand it out the job joins those that wait: there its deadline and a cancellation are
-- seen to.
local function retry(job, handed_out)
  local has_failed = failed(job)
  if has_failed then set(job, {failures = number(job.failures) + 1}) end
  if has_failed and is_used_up(job) then
    bury(job)
  elseif has_failed and number(job.failures) >= 2 then
    delay(job)
  elseif not may_hand_out(handed_out) then
    put_back(job, false)
  else
    move_entry(job)
    hand_over(job, worker, fingerprint)
    return reply_for(job)
  end
end

local function take(job, handed_out)
  if job.cancel then return cancel(job) end
  if late(job) then return expire(job) end
  return retry(job, handed_out)
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
if started_lately() then lapsed = {} end
local orphans = false
for _, id in ipairs(lapsed) do
  if #replies >= room then break end
  local job = load(id)
  if not job or job.state ~= 'running' then
    redis.call('ZREM', K.leases, id)
    orphans = true
  elseif tonumber(job.version) <= version then
    local stream, holder = stream_of(job), job.worker
    local reply = take(job, #replies)
    if holder ~= worker then forget_consumer(stream, holder) end
    if reply then replies[#replies + 1] = reply end
    if reply and is_last(reply) then break end
  end
end
if orphans then refuse_orphans() end
remember('reclaim', worker, request, replies)
return replies
