-- Recording the one result of a job.

-- What takes up a full server is told by the streams that have something to read; see _memory.lua. A name
-- that is new clears away two whose stream has expired, which bounds how many there are.
local function note_reader(name)
  if redis.pcall('ZADD', K.readers, NOW + C.result_ttl, name) == 1 then
    for _, old in ipairs(redis.call('ZRANGEBYSCORE', K.readers, '-inf', NOW, 'LIMIT', 0, 2)) do
      redis.call('ZREM', K.readers, old)
    end
  end
  redis.call('PEXPIRE', K.readers, C.result_ttl)
end

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
  note_reader(name)
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
  local ended = job.stream and redis.pcall('XADD', key, origin_of(job) + number(job.tokens) .. ENDED, E.ended, 1)
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
    payload = false, entry = false, place = false, cancel = false, alone = false,
  })
  redis.call('PEXPIRE', K.job .. job.id, C.result_ttl)
  end_deltas(job)
end

-- What a generation says that the end of its job cut short.
local CUT_SHORT = {cancelled = 'cancelled', expired = 'expired', failed = 'error'}

local function describe(id, status, code, message)
  return {
    id = id, status = status, finish_reason = CUT_SHORT[status], error = {code = code, message = message},
  }
end

-- Adds what of the job goes into every result.
local function add_request(job, answer)
  local request = cjson.decode(payload_of(job) or '')
  if type(request.model) == 'string' then answer.model = request.model end
  if type(request.metadata) == 'table' and next(request.metadata) then
    answer.metadata = request.metadata
  end
end

-- How many generations the job asked for, as far as can be read.
local MAX_N = 64

local function n_of(job)
  local ok, n = pcall(function() return cjson.decode(payload_of(job)).params.n end)
  return math.min(ok and tonumber(n) or 1, MAX_N)
end

-- Log-probabilities end a delta's JSON. They stay text: cjson would round them, and turn an empty
-- array into an object. Returns the rest, and the array's content.
local function part(json)
  local at = string.find(json, ',"logprobs":[', 1, true)
  if not at then return json, nil end
  return string.sub(json, 1, at - 1) .. '}', string.sub(json, at + #',"logprobs":[', -3)
end

local function add_delta(choice, delta, logprobs)
  choice.text[#choice.text + 1] = delta.text or ''
  for _, token in ipairs(delta.token_ids) do choice.token_ids[#choice.token_ids + 1] = token end
  choice.logprobs[#choice.logprobs + 1] = logprobs
  choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
end

-- The generations of a job by number, from its checkpoint; how many tokens they have together.
local function generations_of(job)
  local choices, tokens = {}, 0
  for index = 0, n_of(job) - 1 do choices[index] = {text = {}, token_ids = {}, logprobs = {}} end
  for _, json in ipairs(deltas_of(job)) do
    local rest, logprobs = part(json)
    local delta = cjson.decode(rest)
    add_delta(choices[delta.choice or 0], delta, logprobs)
    tokens = tokens + #delta.token_ids
  end
  return choices, tokens
end

-- The JSON of an answer to which a generation was added, and of its alternatives if there are any.
local function encode(answer, choice, alternatives)
  if #choice.token_ids > 0 then
    answer.text, answer.token_ids = table.concat(choice.text), choice.token_ids
    answer.finish_reason = choice.finish_reason or answer.finish_reason
    answer.stop_reason = choice.stop_reason
  end
  local json = string.sub(cjson.encode(answer), 1, -2)
  if #choice.logprobs > 0 then
    json = json .. ',"logprobs":[' .. table.concat(choice.logprobs, ',') .. ']'
  end
  if alternatives then json = json .. ',"alternatives":[' .. table.concat(alternatives, ',') .. ']' end
  return json .. '}'
end

-- The answer's JSON with what was generated so far.
local function with_generations(job, answer)
  local choices, tokens = generations_of(job)
  local alternatives = {}
  for index, choice in ipairs(choices) do
    alternatives[index] = encode({index = index, finish_reason = CUT_SHORT[answer.status]}, choice)
  end
  if tokens > 0 then answer.usage = {completion_tokens = tokens} end
  return encode(answer, choices[0], #alternatives > 0 and alternatives)
end

-- Answers a job that no worker will finish; `move` is what decided so. Payload and checkpoint may be
-- anything at all: what cannot be read of them is left out.
local function close(job, move, status, code, message)
  local answer = describe(job.id, status, code, message)
  answer.attempts = number(job.attempt)
  answer.worker = job.worker
  pcall(add_request, job, answer)
  local ok, json = pcall(with_generations, job, answer)
  if not ok then ok, json = pcall(cjson.encode, answer) end
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
  reconcile(lane)
end
