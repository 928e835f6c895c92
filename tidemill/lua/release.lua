-- ARGV: as in renew.lua
-- Returns the ids lost.

local worker = ARGV[2]

local lost = {}
local i = 3
while i <= #ARGV do
  local id, attempt, prompt, last = ARGV[i], ARGV[i + 1], ARGV[i + 2], i + 3 + 3 * ARGV[i + 3]
  local job = load(id)
  if held_by(job, worker, attempt) and checkpoint(job, prompt, i + 4, last) then
    if job.cancel then cancel(job) else put_back(job, token_of(worker, attempt)) end
  elseif not (job and job.released == token_of(worker, attempt)) then
    lost[#lost + 1] = id
  end
  i = last + 1
end
return lost
