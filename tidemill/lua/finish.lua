-- ARGV: settings, worker, attempt, id, status, result as JSON
-- Returns what became of it.

local worker, attempt = ARGV[2], ARGV[3]
local token = token_of(worker, attempt)
local job = load(ARGV[4])
if job and job.state == 'done' and job.finisher == token then return 'already' end
if not held_by(job, worker, attempt) then return 'lost' end
record(job, ARGV[6], ARGV[5], token)
return 'ok'
