-- ARGV: settings, worker, then per job: id, attempt, tokens of its prompt, number of deltas, and three
--       values per delta (see store in _leases.lua)
-- Returns the ids lost and the ids cancelled; the latter of all jobs that the worker holds.

local worker = ARGV[2]
local lost, cancelled = {}, {}
local i = 3
while i <= #ARGV do
  local id, attempt, prompt, last = ARGV[i], ARGV[i + 1], ARGV[i + 2], i + 3 + 3 * ARGV[i + 3]
  local job = load(id)
  if held_by(job, worker, attempt) and checkpoint(job, prompt, i + 4, last) then
    redis.call('ZADD', K.leases, NOW + C.lease, id)
    if job.cancel then cancelled[#cancelled + 1] = id end
  else
    lost[#lost + 1] = id
  end
  i = last + 1
end
-- Asked for much more often than a lease is renewed, so that a cancellation is heard of at once. If this
-- reply is lost, the flag of the job itself is seen at its next renewal.
local asked = redis.pcall('SMEMBERS', K.cancelled .. worker)
for _, id in ipairs(asked) do
  local job = load(id)
  if job and job.cancel and held_by(job, worker, job.attempt) then cancelled[#cancelled + 1] = id end
end
if #asked > 0 then redis.call('DEL', K.cancelled .. worker) end
return {lost, cancelled}
