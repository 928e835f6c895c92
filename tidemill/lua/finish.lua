-- ARGV: settings, worker, attempt, id, status, result as JSON,
--       tokens served of the prompt, tokens generated
-- Returns what became of it.

local worker, attempt = ARGV[2], ARGV[3]
local token = token_of(worker, attempt)
local job = load(ARGV[4])
if job and job.state == 'done' and job.finisher == token then return 'already' end
if not held_by(job, worker, attempt) then return 'lost' end
-- At least one unit: to refuse a job is work too, and a tenant of nothing else must not always be next.
charge(job, math.max(1, units(amount(ARGV[7]), amount(ARGV[8]))))
learn(job)
record(job, ARGV[6], ARGV[5], token)
return 'ok'
