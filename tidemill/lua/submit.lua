-- ARGV: settings, version written, then per job: id, digest, payload, priority, tenant, seed,
--       deadline in ms ('' none), reply name, '1' to stream
-- Returns what became of each.

local version = ARGV[2]

local function asked(i)
  return {
    id = ARGV[i], digest = ARGV[i + 1], payload = ARGV[i + 2], priority = ARGV[i + 3], tenant = ARGV[i + 4],
    seed = ARGV[i + 5], deadline = ARGV[i + 6], reply = ARGV[i + 7], stream = ARGV[i + 8],
  }
end

local function with_reply(replies, name, entry)
  return (replies and replies .. ' ' or '') .. name .. '=' .. entry
end

-- Whether its result goes to this name already; to how many it goes.
local function replies_of(job, wanted)
  local known, count = false, 0
  for name in string.gmatch(job.replies, '([^= ]+)=') do
    known, count = known or name == wanted, count + 1
  end
  return known, count
end

-- The result is kept in the streams it went to; take it from the first that still has it.
local function recorded(job)
  for name, entry in string.gmatch(job.replies, '([^= ]+)=([^ ]+)') do
    local found = redis.pcall('XRANGE', K.results .. name, entry, entry)
    if found[1] then return found[1][2][4] end
  end
end

local function join(job, ask)
  if job.digest ~= ask.digest then return 'conflict' end
  job.replies = job.replies or ''
  local known, count = replies_of(job, ask.reply)
  if not known and count >= C.max_replies then return 'too_many_replies' end
  if job.state ~= 'done' then
    if not known then set(job, {replies = with_reply(job.replies, ask.reply, '')}) end
    return 'live'
  end
  local result = not known and recorded(job)
  if result then
    set(job, {replies = with_reply(job.replies, ask.reply, deliver(ask.reply, job.id, result))})
  end
  return 'done'
end

local function tenant_depth(tenant)
  local sum = 0
  for _, priority in ipairs(C.priorities) do
    sum = sum + number(redis.call('HGET', K.load, version .. ':' .. priority .. ':' .. tenant))
  end
  return sum
end

local function submit(ask)
  local known = load(ask.id)
  if known then return join(known, ask) end
  if number(redis.call('HGET', K.load, TOTAL)) >= C.max_depth then return 'queue_full' end
  if C.max_tenant_depth and tenant_depth(ask.tenant) >= C.max_tenant_depth then return 'tenant_full' end

  local job = {id = ask.id}
  redis.call('DEL', K.job .. job.id, K.deltas .. job.id)
  set(job, {
    digest = ask.digest, payload = ask.payload, version = version, priority = ask.priority,
    tenant = ask.tenant, seed = ask.seed, deadline = ask.deadline ~= '' and NOW + ask.deadline,
    replies = with_reply(nil, ask.reply, ''), stream = ask.stream == '1' and 1, submitted = NOW,
  })
  count(job)
  enqueue(job, 'jobs')
  return 'created'
end

local outcomes = {}
for i = 3, #ARGV, 9 do outcomes[#outcomes + 1] = submit(asked(i)) end
return outcomes
