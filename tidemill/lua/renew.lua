-- ARGV: settings, worker, then per job: id, attempt, number of deltas, and three values per delta
--       (see checkpoint in _jobs.lua)
-- Returns the ids lost and the ids cancelled.

local worker = ARGV[2]
local lost, cancelled = {}, {}
local i = 3
while i <= #ARGV do
  local id, attempt, last = ARGV[i], ARGV[i + 1], i + 2 + 3 * ARGV[i + 2]
  local job = load(id)
  if held_by(job, worker, attempt) and checkpoint(job, i + 3, last) then
    redis.call('ZADD', K.leases, NOW + C.lease, id)
    if job.cancel then cancelled[#cancelled + 1] = id end
  else
    lost[#lost + 1] = id
  end
  i = last + 1
end
return {lost, cancelled}
