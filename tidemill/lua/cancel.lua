-- ARGV: settings, id
-- Returns what became of it.

local job = load(ARGV[2])
if not job then return 'unknown' end
if job.state == 'done' then return job.finisher == 'cancel' and 'cancelled' or 'finished' end
if job.state == 'running' and number(redis.call('ZSCORE', K.leases, job.id)) > NOW then
  set(job, {cancel = 1})
  redis.pcall('SADD', K.cancelled .. job.worker, job.id)
  redis.call('PEXPIRE', K.cancelled .. job.worker, C.lease)
  return 'requested'
end
cancel(job)
return 'cancelled'
