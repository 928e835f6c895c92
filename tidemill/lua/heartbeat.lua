-- ARGV: settings, name, report as JSON

local name, report = ARGV[2], ARGV[3]
redis.call('SET', K.worker .. name, report, 'PX', C.worker_ttl)
redis.call('ZREMRANGEBYSCORE', K.workers, '-inf', NOW)
redis.call('ZADD', K.workers, NOW + C.worker_ttl, name)
redis.call('PEXPIRE', K.workers, C.worker_ttl)
