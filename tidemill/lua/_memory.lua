-- How much a full server may still hand out. Moves that hand out jobs are not refused at its limit, so that
-- it can be emptied; but then what fills it could grow without bound.

-- How many bytes beyond its limit the server may hold, and whether it holds more. The buffers that Redis
-- leaves out of its limit are left out.
local function overdraft()
  local memory = redis.call('INFO', 'memory')
  local function bytes(name) return number(string.match(memory, name .. ':(%d+)')) end
  local limit = bytes('\nmaxmemory')
  local used = bytes('\nused_memory') - bytes('mem_not_counted_for_evict')
  local allowed = limit * C.memory_overdraft
  return allowed, limit > 0 and used > limit + allowed
end

-- The bytes of a result stream. One that has nothing to read is not looked at again until it has.
local function unread(name)
  local key = K.results .. name
  if redis.pcall('XLEN', key) == 0 then
    redis.call('ZREM', K.readers, name)
    return 0
  end
  return redis.call('MEMORY', 'USAGE', key)
end

-- How many streams one call looks at, those first that had a result last: they are the ones that grow.
-- Measured: 2 ms of the server's time.
local STREAMS = 1000

local function unread_beyond(allowed)
  local sum = 0
  for _, name in ipairs(redis.pcall('ZRANGE', K.readers, 0, STREAMS - 1, 'REV')) do
    sum = sum + unread(name)
    if sum > allowed then return true end
  end
  return false
end

local function is_anybody_at_work()
  return redis.call('ZRANGEBYSCORE', K.leases, '(' .. NOW, '+inf', 'LIMIT', 0, 1)[1] ~= nil
end

-- How many jobs a call may hand out. Where results that nobody reads take up the overdraft, none: they would
-- grow without bound, and are to be read. Where it is payloads and checkpoints, nothing frees memory but work;
-- so there is one job at a time, which gives back what it took before there is another.
local function allowance()
  local allowed, overdrawn = overdraft()
  if not overdrawn then return math.huge end
  if is_anybody_at_work() or unread_beyond(allowed) then return 0 end
  return 1
end

local most

-- Whether a call that has handed out so many jobs may hand out one more. Asking the server takes longer than
-- most commands, so it is asked once a call, and not before there is a job.
local function may_hand_out(handed_out)
  most = most or allowance()
  return handed_out < most
end
