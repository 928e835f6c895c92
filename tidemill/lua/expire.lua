-- ARGV: settings, number of jobs at most
-- Returns how many deadlines it dealt with.

return expire_waiting(tonumber(ARGV[2]))
