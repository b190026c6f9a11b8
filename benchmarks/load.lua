-- wrk: POST the bodies of a file, one per line, in turn. In each request, another text replaces the mark "@unique@".
-- Arguments: file, tag of this run, and the number of answers after which wrk idles, if any. If a body has no mark, only
-- this body is sent, as it is. A file of one such body costs the least.

local heads, tails, tag, turn = {}, {}, "", 0
local mark = "@unique@"

local function unique_request()
  turn = turn + 1
  local i = turn % #heads + 1
  return wrk.format(nil, nil, nil, heads[i] .. tag .. turn .. tails[i])
end

local function idle_after(answers)
  function response()
    answers = answers - 1
    if answers == 0 then wrk.thread:stop() end
  end
end

function init(args)
  if args[3] then idle_after(tonumber(args[3])) end
  wrk.method = "POST"
  wrk.headers["Content-Type"] = "application/json"
  tag = args[2] .. "-"
  for line in io.lines(args[1]) do
    local at = line:find(mark, 1, true)
    if at == nil then
      wrk.body = line
      return
    end
    heads[#heads + 1] = line:sub(1, at - 1)
    tails[#tails + 1] = line:sub(at + #mark)
  end
  request = unique_request
end

function done(summary, latency)
  local e = summary.errors
  io.write(string.format(
    '\n@{"requests":%d,"duration_us":%d,"p50_us":%d,"p99_us":%d,'
      .. '"failed_connects":%d,"failed_reads":%d,"failed_writes":%d,"bad_statuses":%d,"timeouts":%d}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    e.connect, e.read, e.write, e.status, e.timeout))
end
