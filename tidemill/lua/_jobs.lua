-- Shared by all moves: reading a job, and taking it from one place to the next.
-- C holds the queue's settings (times in ms); a script's own arguments begin at ARGV[2].

local C = cjson.decode(ARGV[1])

local NOW
do
  local time = redis.call('TIME')
  NOW = time[1] * 1000 + math.floor(time[2] / 1000)
end

-- A foreign hand may have put anything under a key of ours: such a job counts as missing.
local function load(id)
  local names = {}
  for i, name in ipairs(LIGHT) do names[i] = F[name] end
  local values = redis.pcall('HMGET', K.job .. id, unpack(names))
  if values.err then return nil end
  local job = {id = id}
  for i, name in ipairs(LIGHT) do job[name] = values[i] or nil end
  if not (job.state and tonumber(job.version) and job.priority and job.tenant) then return nil end
  return job
end

local function payload_of(job) return redis.call('HGET', K.job .. job.id, F.payload) end

-- Writes fields both to Redis and to the table at hand; false removes one.
local function set(job, values)
  local written, removed = {}, {}
  for name, value in pairs(values) do
    if value then
      written[#written + 1] = F[name]
      written[#written + 1] = value
      job[name] = tostring(value)
    else
      removed[#removed + 1] = F[name]
      job[name] = nil
    end
  end
  if #written > 0 then redis.call('HSET', K.job .. job.id, unpack(written)) end
  if #removed > 0 then redis.call('HDEL', K.job .. job.id, unpack(removed)) end
end

local function number(text) return tonumber(text) or 0 end

local function token_of(worker, attempt) return worker .. '#' .. attempt end

local function held_by(job, worker, attempt)
  return job and job.state == 'running' and job.worker == worker and job.attempt == attempt
end

local function lane_of(job) return job.version .. ':' .. job.priority .. ':' .. job.tenant end

local function stream_of(job) return K[job.place or 'jobs'] .. lane_of(job) end

-- Once a script is enough.
local rung = false

local function ring()
  if rung then return end
  rung = true
  redis.call('XADD', K.doorbell, 'MAXLEN', 1, '*', E.ring, 1)
  redis.call('PEXPIRE', K.doorbell, C.result_ttl)
end

local function share(tenant)
  return 1 / (tonumber(redis.call('HGET', K.weights, tenant)) or 1)
end

-- Start-time fair queueing: who comes (back) to the queue stands one turn behind whom was served
-- last, so that neither being new nor having been away is worth more than one turn.
local function activate(job)
  local active = K.active .. job.version .. ':' .. job.priority
  if redis.call('ZSCORE', active, job.tenant) then return end
  local turn = tonumber(redis.call('HGET', K.clock, job.priority))
  if turn then
    turn = turn + share(job.tenant)
  else
    turn = number(redis.call('ZRANGE', active, 0, 0, 'WITHSCORES')[2])
  end
  redis.call('ZADD', active, turn, job.tenant)
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
  if job.entry then drop(stream_of(job), job.entry) end
  redis.call('ZREM', K.leases, job.id)
  redis.call('ZREM', K.deadlines, job.id)
  redis.call('ZREM', K.delayed, job.id)
end

local function count(job)
  redis.call('HINCRBY', K.load, TOTAL, 1)
  redis.call('HINCRBY', K.load, lane_of(job), 1)
end

local function close_lane(lane)
  local version, priority, tenant = string.match(lane, '^(%d+):(%a+):(.+)$')
  redis.call('HDEL', K.load, lane)
  redis.call('ZREM', K.active .. version .. ':' .. priority, tenant)
end

local function discount_total(by)
  if redis.call('HINCRBY', K.load, TOTAL, -by) <= 0 then redis.call('HDEL', K.load, TOTAL) end
end

-- A lane without entries has no jobs but delayed ones; what its count says beyond is jobs whose
-- hash was taken from us, by an eviction perhaps.
local function settle(lane)
  if redis.call('EXISTS', K.jobs .. lane, K.returned .. lane) > 0 then return end
  if redis.call('ZCARD', K.delayed) > 0 then return end
  local missing = number(redis.call('HGET', K.load, lane))
  if missing > 0 then discount_total(missing) end
  close_lane(lane)
end

local function discount(job)
  local lane = lane_of(job)
  discount_total(1)
  if redis.call('HINCRBY', K.load, lane, -1) > 0 then return settle(lane) end
  redis.call('HDEL', K.load, lane)
  -- Entries that are left stand for no job; the next claim refuses them, and closes the lane.
  if redis.call('EXISTS', K.jobs .. lane, K.returned .. lane) == 0 then close_lane(lane) end
end

-- Stores deltas given as (first token, number of tokens, JSON) in ARGV[from..to]. An entry's id is
-- the number of tokens up to its end, so that a repeat is recognised and a reader can seek.
-- Returns false at a gap, or if a foreign hand was in the stream: the holder and the checkpoint have
-- parted ways.
local function checkpoint(job, from, to)
  local tokens = number(job.tokens)
  for i = from, to, 3 do
    local first, last = tonumber(ARGV[i]), ARGV[i] + ARGV[i + 1]
    if first > tokens then return false end
    if first == tokens then
      local added = redis.pcall('XADD', K.deltas .. job.id, last .. '-0', E.delta, ARGV[i + 2])
      if type(added) == 'table' then return false end
      tokens = last
    end
  end
  if tokens > number(job.tokens) then set(job, {tokens = tokens}) end
  return true
end

-- A checkpoint that is gone or unreadable is given as one delta that nobody can decode.
local function deltas_of(job)
  local deltas = {}
  if not job.tokens then return deltas end
  for _, entry in ipairs(redis.pcall('XRANGE', K.deltas .. job.id, '-', '+')) do
    deltas[#deltas + 1] = entry[2][2]
  end
  return #deltas > 0 and deltas or {''}
end
