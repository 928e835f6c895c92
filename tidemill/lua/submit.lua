-- ARGV: settings, id, digest, payload, version, priority, tenant, seed, deadline in ms ('' none),
--       reply name, '1' to stream, depth limit, tenant's depth limit ('' none)
-- Returns what became of it.

local id, digest, reply = ARGV[2], ARGV[3], ARGV[10]

local function with_reply(replies, entry)
  return (replies and replies .. ' ' or '') .. reply .. '=' .. entry
end

local function has_reply(job)
  return string.find(' ' .. job.replies .. ' ', ' ' .. reply .. '=', 1, true)
end

-- The result is kept in the streams it went to; take it from the first that still has it.
local function recorded(job)
  for name, entry in string.gmatch(job.replies, '([^= ]+)=([^ ]+)') do
    local found = redis.pcall('XRANGE', K.results .. name, entry, entry)
    if found[1] then return found[1][2][4] end
  end
end

local function join(job)
  if job.digest ~= digest then return 'conflict' end
  job.replies = job.replies or ''
  if job.state ~= 'done' then
    if not has_reply(job) then set(job, {replies = with_reply(job.replies, '')}) end
    return 'live'
  end
  local result = not has_reply(job) and recorded(job)
  if result then set(job, {replies = with_reply(job.replies, deliver(reply, id, result))}) end
  return 'done'
end

local function tenant_depth(tenant)
  local sum = 0
  for _, priority in ipairs(C.priorities) do
    sum = sum + number(redis.call('HGET', K.load, ARGV[5] .. ':' .. priority .. ':' .. tenant))
  end
  return sum
end

local known = load(id)
if known then return join(known) end

if number(redis.call('HGET', K.load, TOTAL)) >= tonumber(ARGV[12]) then return 'queue_full' end
if ARGV[13] ~= '' and tenant_depth(ARGV[7]) >= tonumber(ARGV[13]) then return 'tenant_full' end

local job = {id = id}
redis.call('DEL', K.job .. id, K.deltas .. id)
set(job, {
  digest = digest, payload = ARGV[4], version = ARGV[5], priority = ARGV[6], tenant = ARGV[7],
  seed = ARGV[8], deadline = ARGV[9] ~= '' and NOW + ARGV[9], replies = with_reply(nil, ''),
  stream = ARGV[11] == '1' and 1, submitted = NOW,
})
count(job)
enqueue(job, 'jobs')
return 'created'
