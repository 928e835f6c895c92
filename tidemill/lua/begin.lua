-- ARGV: settings, worker, attempt, id
-- Returns 1 if the job is this holder's; from here on its lease lapses at its own risk.

local worker, attempt = ARGV[2], ARGV[3]
local job = load(ARGV[4])
if not held_by(job, worker, attempt) then return 0 end
if job.alone then set(job, {alone = 'begun'}) end
redis.call('ZADD', K.leases, NOW + C.lease, job.id)
return 1
