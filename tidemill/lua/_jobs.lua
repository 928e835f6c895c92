-- Shared by all moves: reading a job and writing to it.
-- C holds the queue's settings (times in ms); a script's own arguments begin at ARGV[2].

local C = cjson.decode(ARGV[1])

local NOW
do
  local time = redis.call('TIME')
  NOW = time[1] * 1000 + math.floor(time[2] / 1000)
end

local LIGHT_FIELDS = {}
for i, name in ipairs(LIGHT) do LIGHT_FIELDS[i] = F[name] end

-- A foreign hand may have put anything under a key of ours: such a job counts as missing.
local function load(id)
  local values = redis.pcall('HMGET', K.job .. id, unpack(LIGHT_FIELDS))
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

-- What the ids of a delta stream count from, so that they rise for readers whatever is dropped.
local function origin_of(job) return number(job.origin) end

-- A checkpoint that is gone or unreadable is given as one delta that nobody can decode.
local function deltas_of(job)
  local deltas = {}
  if not job.tokens then return deltas end
  local begin = '(' .. origin_of(job) .. RESTARTED
  for _, entry in ipairs(redis.pcall('XRANGE', K.deltas .. job.id, begin, '+')) do
    deltas[#deltas + 1] = entry[2][2]
  end
  return #deltas > 0 and deltas or {''}
end
