-- Giving jobs to a worker, giving the same ones again when it repeats the question, and keeping what
-- it has generated.

-- Stores deltas given as (first token, number of tokens, JSON) in ARGV[from..to]; a repeat is recognised.
-- Returns false at a gap, or if a foreign hand was in the stream: the holder and the checkpoint have
-- parted ways.
local function store(job, from, to)
  local tokens = number(job.tokens)
  for i = from, to, 3 do
    local first, last = tonumber(ARGV[i]), ARGV[i] + ARGV[i + 1]
    if first > tokens then return false end
    if first == tokens then
      local added = redis.pcall('XADD', K.deltas .. job.id, origin_of(job) + last .. '-0', E.delta, ARGV[i + 2])
      if type(added) == 'table' then return false end
      tokens = last
    end
  end
  if tokens > number(job.tokens) then set(job, {tokens = tokens}) end
  return true
end

-- What a holder reports of its job: the tokens of its prompt (0 if it does not know them yet), and
-- deltas. While the attempt may still be lost, the prompt counts only if something has come of it.
local function checkpoint(job, prompt, from, to)
  if not store(job, from, to) then return false end
  local tokens = number(job.tokens)
  if tokens > 0 then charge(job, units(amount(prompt), tokens)) end
  return true
end

-- Whether a worker cannot go on from the checkpoint, because another build made it.
local function foreign(job, fingerprint) return job.tokens and (job.fingerprint or '') ~= fingerprint end

-- Drops what was generated. Whoever reads along is told so, behind all that was there to read.
local function restart(job)
  local origin = origin_of(job) + number(job.tokens)
  redis.call('DEL', K.deltas .. job.id)
  if job.stream then redis.call('XADD', K.deltas .. job.id, origin .. RESTARTED, E.restart, 1) end
  set(job, {origin = origin, tokens = false})
end

-- Whether it must run alone, because one more failure may bury it. If it is its work that brings workers
-- down, it must not take the others' jobs with it; and if it is not, it must not be taken with them. Who has
-- set another max_attempts may have counted further already.
local function is_suspect(job)
  return C.max_attempts > 1 and number(job.failures) >= C.max_attempts - 1
end

-- Makes the worker, whose build has this fingerprint, the holder.
local function hand_over(job, worker, fingerprint)
  if foreign(job, fingerprint) then restart(job) end
  set(job, {
    state = 'running', worker = worker, attempt = number(job.attempt) + 1,
    base = number(job.tokens), claimed = NOW, released = false,
    alone = is_suspect(job) and 'held', fingerprint = fingerprint ~= '' and fingerprint,
    promised = promise(job),
  })
  redis.call('ZADD', K.leases, NOW + C.lease, job.id)
  redis.call('ZREM', K.deadlines, job.id)
end

-- The time given is that of this reply: the holder counts from when it hears of the job, and a reply that
-- was lost must not lengthen the deadline.
local function reply_for(job)
  return {
    job.id, payload_of(job) or '', job.seed or '0', job.attempt, job.failures or '0',
    job.submitted or '0', NOW, job.deadline or '', job.stream and '1' or '0', job.alone and '1' or '0',
    deltas_of(job),
  }
end

-- A worker is given one suspect at a time, so it is the last of a call.
local function is_last(reply) return reply[10] == '1' end

-- Without this, the jobs of a lost reply would be held by a worker that does not know of them until
-- the lease runs out. A request is <series>:<number>; the worker repeats a number until it has seen
-- a reply, so a number that is passed already comes from a call that nobody waits for any more.
-- Returns the replies to give; nil for a new request.
local function answered(move, worker, request)
  local receipt = redis.call('HGET', K.receipt .. worker, move)
  if not receipt then return nil end
  local words = {}
  for word in string.gmatch(receipt, '%S+') do words[#words + 1] = word end
  local last_series, last = string.match(words[1], '^(.+):(%d+)$')
  local series, current = string.match(request, '^(.+):(%d+)$')
  if series ~= last_series or tonumber(current) > tonumber(last) then return nil end
  local replies = {}
  if tonumber(current) < tonumber(last) then return replies end
  for i = 2, #words, 2 do
    local job = load(words[i])
    if held_by(job, worker, words[i + 1]) then
      redis.call('ZADD', K.leases, NOW + C.lease, job.id)
      replies[#replies + 1] = reply_for(job)
    end
  end
  return replies
end

-- Kept for much longer than the lease, because a call may be repeated after a long outage.
local function remember(move, worker, request, replies)
  local words = {request}
  for _, reply in ipairs(replies) do
    words[#words + 1] = reply[1]
    words[#words + 1] = reply[4]
  end
  redis.call('HSET', K.receipt .. worker, move, table.concat(words, ' '))
  redis.call('PEXPIRE', K.receipt .. worker, math.max(C.lease, C.result_ttl))
end
