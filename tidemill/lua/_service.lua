-- Fairness between tenants: virtual token counters, after "Fairness in Serving Large Language Models"
-- (Sheng et al., OSDI 2024). Among the tenants of a priority that have waiting jobs, the one that was
-- served least is next. What counts as service is said in service.py; it is divided by the tenant's weight.
--
-- What a job costs is known when it ends. Until then claim promises it what jobs cost on average, and
-- each report takes from the promise; so a burst of claims goes round, and in the end nothing is charged
-- but what was served.
--
-- An account is `<served> <promised>`: what the lane was served, by weight, and what is still promised to
-- its running jobs, in units.

-- The mean follows the last 16 jobs or so. How far two tenants with lognormal jobs were ahead of each other
-- on 32 places (standard deviation, in mean jobs): 12.3 to 13.0 for 4 to 256 jobs, 16.3 if all are promised
-- one unit; with sizes that change every 60 jobs, 11.1 to 12.5, and 14.5.
local NEWS = 1 / 16

-- Nothing that a foreign hand writes may make an account infinite: nil for what cannot be counted on.
local function countable(text)
  local value = tonumber(text)
  return value and value >= 0 and value < 2 ^ 53 and value or nil
end

local function amount(text) return countable(text) or 0 end

-- What the lane's tenant stands in line with.
local function standing_of(lane)
  local kind, tenant = string.match(lane, '^([^:]*:[^:]*):(.*)$')
  return amount(redis.call('ZSCORE', K.active .. kind, tenant))
end

-- The place in line outlives an account that is lost or damaged: nobody gets ahead by that.
local function read_account(lane)
  local text = redis.call('HGET', K.accounts, lane) or ''
  local first, second = string.match(text, '^(%S+) (%S+)$')
  local served = countable(first)
  if not served then return {served = standing_of(lane), promised = 0} end
  return {served = served, promised = amount(second)}
end

local function write_account(lane, account)
  redis.call('HSET', K.accounts, lane, string.format('%.17g %.17g', account.served, account.promised))
end

local function account_of(job)
  local account = read_account(lane_of(job))
  local weight = amount(redis.call('HGET', K.weights, job.tenant))
  account.weight = weight > 0 and weight or 1
  return account
end

local function active_of(job) return K.active .. job.version .. ':' .. job.priority end

-- Writes the account, and puts the tenant where it now belongs in the line, if it stands there.
local function settle_account(job, account)
  write_account(lane_of(job), account)
  local standing = account.served + account.promised / account.weight
  redis.call('ZADD', active_of(job), 'XX', standing, job.tenant)
end

-- What the first in line was served or, if there is none, what the last one had been.
local function least_service(job)
  local first = redis.call('ZRANGE', active_of(job), 0, 0)[1]
  if first then return read_account(job.version .. ':' .. job.priority .. ':' .. first).served end
  return amount(redis.call('HGET', K.clock, job.priority))
end

-- Notes, of the lane that has just been chosen, what `least_service` says when nobody is in line.
local function set_clock(priority, lane)
  redis.call('HSET', K.clock, priority, read_account(lane).served)
end

-- Having been away earns nothing: who comes (back) is lifted to the least served. Nor is anything forgotten:
-- who had been served more keeps that.
local function activate(job)
  local active = active_of(job)
  if redis.call('ZSCORE', active, job.tenant) then return end
  local account = account_of(job)
  account.served = math.max(account.served, least_service(job))
  redis.call('ZREM', K.resting, lane_of(job))
  redis.call('ZADD', active, 0, job.tenant)
  settle_account(job, account)
end

local function mean_cost() return amount(redis.call('HGET', K.accounts, TOTAL)) end

-- Returns what the job is promised. Never nothing: it is what keeps the next claim from going to the
-- same tenant.
local function promise(job)
  local account = account_of(job)
  local promised = math.max(1, math.ceil(mean_cost()))
  account.promised = math.max(0, account.promised - amount(job.promised)) + promised
  settle_account(job, account)
  return promised
end

-- Takes back what was promised and not served.
local function withdraw(job)
  if not job.promised then return end
  local account = account_of(job)
  account.promised = math.max(0, account.promised - amount(job.promised))
  set(job, {promised = false})
  settle_account(job, account)
end

local function units(prompt, tokens) return C.prompt_token * prompt + C.generated_token * tokens end

-- Charges what the job was served beyond what it is charged already: `total` is all it was ever served,
-- so that a report may be repeated, and a token is charged once over any number of attempts.
local function charge(job, total)
  local served, promised = amount(job.served), amount(job.promised)
  local more = amount(total) - served
  if more <= 0 then return end
  local covered = math.min(more, promised)
  set(job, {served = served + more, promised = covered < promised and promised - covered})
  local account = account_of(job)
  account.served = account.served + more / account.weight
  account.promised = math.max(0, account.promised - covered)
  settle_account(job, account)
end

-- Makes what the job cost part of what the next one is expected to.
local function learn(job)
  local cost, mean = amount(job.served), mean_cost()
  redis.call('HSET', K.accounts, TOTAL, mean > 0 and mean + NEWS * (cost - mean) or cost)
end

-- A tenant without unfinished jobs is remembered as long as an answer is. Each one that goes to rest
-- clears away two that did so long ago, which bounds how many there are.
local function rest(lane)
  local account = read_account(lane)
  if account.promised > 0 then  -- to jobs whose hash was taken from us
    account.promised = 0
    write_account(lane, account)
  end
  redis.call('ZADD', K.resting, NOW, lane)
  for _, old in ipairs(redis.call('ZRANGEBYSCORE', K.resting, '-inf', NOW - C.result_ttl, 'LIMIT', 0, 2)) do
    redis.call('HDEL', K.accounts, old)
    redis.call('ZREM', K.resting, old)
  end
end

-- Where nobody has jobs, nobody is ahead of anybody; the numbers begin at 0 again.
local function close_accounts() redis.call('DEL', K.accounts, K.resting, K.clock) end
