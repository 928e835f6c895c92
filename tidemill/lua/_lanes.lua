-- Where a job is: taking it from one place to the next, and counting what is unfinished.

-- Once a script is enough.
local rung = false

local function ring()
  if rung then return end
  rung = true
  redis.call('XADD', K.doorbell, 'MAXLEN', 1, '*', E.ring, 1)
  redis.call('PEXPIRE', K.doorbell, C.result_ttl)
end

-- place: 'jobs', the end of the line, or 'returned', which is served before it.
local function enqueue(job, place)
  job.place = place ~= 'jobs' and place or nil
  local entry = redis.call('XADD', stream_of(job), '*', E.id, job.id)
  set(job, {state = 'waiting', place = job.place or false, entry = entry})
  if job.deadline then redis.call('ZADD', K.deadlines, job.deadline, job.id) end
  activate(job)
  ring()
end

-- An emptied stream goes, and with it the group and its consumers: none outlives its work.
local function drop(stream, entry)
  redis.call('XACK', stream, GROUP, entry)
  redis.call('XDEL', stream, entry)
  if redis.call('XLEN', stream) == 0 then redis.call('DEL', stream) end
end

local function detach(job)
  withdraw(job)
  if job.entry then drop(stream_of(job), job.entry) end
  redis.call('ZREM', K.leases, job.id)
  redis.call('ZREM', K.deadlines, job.id)
  redis.call('ZREM', K.delayed, job.id)
end

-- Back to the head of the line; `released` names the holder who gave it back, if one did.
local function put_back(job, released)
  detach(job)
  set(job, {released = released, worker = false, alone = false})
  enqueue(job, 'returned')
end

local function count(job)
  redis.call('HINCRBY', K.load, TOTAL, 1)
  redis.call('HINCRBY', K.load, lane_of(job), 1)
end

local function discount_total(by)
  if redis.call('HINCRBY', K.load, TOTAL, -by) <= 0 then redis.call('HDEL', K.load, TOTAL) end
end

local function close_lane(lane)
  local version, priority, tenant = string.match(lane, '^(%d+):(%a+):(.+)$')
  redis.call('HDEL', K.load, lane)
  redis.call('ZREM', K.active .. version .. ':' .. priority, tenant)
  if redis.call('HEXISTS', K.load, TOTAL) == 1 then rest(lane) else close_accounts() end
end

-- A lane without entries has no jobs but delayed ones; what its count says beyond is jobs whose
-- hash was taken from us, by an eviction perhaps.
local function reconcile(lane)
  if redis.call('EXISTS', K.jobs .. lane, K.returned .. lane) > 0 then return end
  if redis.call('ZCARD', K.delayed) > 0 then return end
  local missing = number(redis.call('HGET', K.load, lane))
  if missing > 0 then discount_total(missing) end
  close_lane(lane)
end

local function discount(job)
  local lane = lane_of(job)
  discount_total(1)
  if redis.call('HINCRBY', K.load, lane, -1) > 0 then return reconcile(lane) end
  redis.call('HDEL', K.load, lane)
  -- Entries that are left stand for no job; the next claim refuses them, and closes the lane.
  if redis.call('EXISTS', K.jobs .. lane, K.returned .. lane) == 0 then close_lane(lane) end
end
