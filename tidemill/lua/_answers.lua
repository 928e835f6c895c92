-- Recording the one result of a job.

-- Returns the entry's id. A foreign key in the way of the stream must not cost the answer: it then
-- goes to the default stream.
local function deliver(name, id, result)
  local key = K.results .. name
  local oldest = NOW - C.result_ttl
  local entry = redis.pcall('XADD', key, 'MINID', '=', oldest, '*', E.id, id, E.result, result)
  if type(entry) == 'table' then
    if name == DEFAULT_RESULTS then return '' end
    return deliver(DEFAULT_RESULTS, id, result)
  end
  redis.call('PEXPIRE', key, C.result_ttl)
  return entry
end

local function deliver_all(job, result)
  local replies = {}
  for name in string.gmatch(job.replies or DEFAULT_RESULTS .. '=', '([^= ]+)=') do
    replies[#replies + 1] = name .. '=' .. deliver(name, job.id, result)
  end
  return table.concat(replies, ' ')
end

-- Readers of a streamed job are told of the end and get time to read up to it; a mere checkpoint
-- has served its purpose.
local function end_deltas(job)
  local key = K.deltas .. job.id
  local ended = job.stream and redis.pcall('XADD', key, number(job.tokens) .. '-1', E.ended, 1)
  if type(ended) == 'string' then
    redis.call('PEXPIRE', key, C.stream_ttl)
  else
    redis.call('DEL', key)
  end
end

-- The result first: whatever stops this script, no job is done without one.
local function record(job, result, status, finisher)
  local replies = deliver_all(job, result)
  detach(job)
  discount(job)
  set(job, {
    state = 'done', status = status, finisher = finisher, finished = NOW, replies = replies,
    payload = false, entry = false, place = false, cancel = false,
  })
  redis.call('PEXPIRE', K.job .. job.id, C.result_ttl)
  end_deltas(job)
end

local function describe(id, status, code, message)
  return {id = id, status = status, error = {code = code, message = message}}
end

-- Adds what was generated so far.
local function add_checkpoint(job, answer)
  local text, token_ids = {}, {}
  for _, json in ipairs(deltas_of(job)) do
    local delta = cjson.decode(json)
    text[#text + 1] = delta.text or ''
    for _, token in ipairs(delta.token_ids) do token_ids[#token_ids + 1] = token end
  end
  if #token_ids == 0 then return end
  answer.text, answer.token_ids = table.concat(text), token_ids
  answer.usage = {completion_tokens = #token_ids}
end

-- Adds what of the job goes into every result.
local function add_request(job, answer)
  local request = cjson.decode(payload_of(job) or '')
  if type(request.model) == 'string' then answer.model = request.model end
  if type(request.metadata) == 'table' and next(request.metadata) then
    answer.metadata = request.metadata
  end
end

-- Answers a job that no worker will finish; `move` is what decided so. Payload and checkpoint may be
-- anything at all: what cannot be read of them is left out.
local function close(job, move, status, code, message)
  local answer = describe(job.id, status, code, message)
  answer.attempts = number(job.attempt)
  answer.worker = job.worker
  pcall(add_request, job, answer)
  pcall(add_checkpoint, job, answer)
  local ok, json = pcall(cjson.encode, answer)
  record(job, ok and json or cjson.encode(describe(job.id, status, code, message)), status, move)
end

local function cancel(job)
  close(job, 'cancel', 'cancelled', 'cancelled', 'cancelled before it finished')
end

local function late(job) return job.deadline and number(job.deadline) <= NOW end

local function expire(job)
  close(job, 'expire', 'expired', 'deadline_exceeded', 'the deadline passed before the job finished')
end

local function bury(job)
  local oldest = NOW - C.dead_letter_ttl
  redis.call('XADD', K.dead, 'MINID', '=', oldest, '*', E.id, job.id, E.payload, payload_of(job) or '',
    E.failures, number(job.failures), E.worker, job.worker or '')
  redis.call('PEXPIRE', K.dead, C.dead_letter_ttl)
  close(job, 'bury', 'failed', 'attempts_exhausted',
    'given up after ' .. number(job.failures) .. ' attempts that ended with their worker lost')
end

-- Deadlines of running jobs are their holder's business, and reclaim's.
local function expire_waiting(limit)
  local ids = redis.call('ZRANGEBYSCORE', K.deadlines, '-inf', NOW, 'LIMIT', 0, limit)
  for _, id in ipairs(ids) do
    local job = load(id)
    if job and (job.state == 'waiting' or job.state == 'delayed') then
      expire(job)
    else
      redis.call('ZREM', K.deadlines, id)
    end
  end
  return #ids
end

local function id_in(entry)
  for i = 1, #entry[2], 2 do
    if entry[2][i] == E.id then return entry[2][i + 1] end
  end
end

local function readable(id) return string.match(id, '^[%w_.:-]+$') and #id <= 128 end

-- An entry that stands for no job is answered under whatever name it has, and removed.
local function refuse(lane, stream, entry)
  local id = id_in(entry)
  local name = id and readable(id) and id or entry[1]
  local answer = describe(name, 'failed', 'undecodable', 'an entry of a job stream without a job')
  deliver(DEFAULT_RESULTS, name, cjson.encode(answer))
  drop(stream, entry[1])
  settle(lane)
end
