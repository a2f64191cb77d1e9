-- All that the limiter does in Redis, as one script: see redis.go for the keys.
-- The first argument names the call, the second is the prefix of all keys of the
-- organisation, the third a list of all numbers (MessagePack), then come ids. Keys
-- that a record names are of the same organisation, so of the same slot. All
-- numbers are integers below 2^53, which doubles hold exactly.
local call = redis.call
local P = ARGV[2]
local A = cmsgpack.unpack(ARGV[3])
local X = KEYS[1] -- expiries: record -> time
local clock = call('TIME')
local now = clock[1] * 1000000 + clock[2]

local EXACT = 9007199254740992 -- 2^53
local REMEMBERED, LONGEST, SWEEP, SHARE, LOW = A[1], A[2], A[3], A[4], A[5] -- the first two in ms
local LEASED = 61000 -- ms, more than a lease lasts
local FIRST = 6 -- of the call's own numbers
local format, sub, pack, unpack_ = string.format, string.sub, struct.pack, struct.unpack

-- Numbers as Redis reads them: its own conversion may write 1e+15.
local function str(n) return format('%d', n) end

-- floor((a*b + r) / c) and what is left; a <= 2^50, b < c <= 2^42, r < c.
local function muldiv(a, b, c, r)
  local x = a * b + r
  if x < EXACT then
    local m = math.fmod(x, c)
    return (x - m) / c, m
  end
  -- Long division with digits of ten bits: no step exceeds 2^53.
  local q, rest, digit = 0, 0, 1125899906842624
  while digit >= 1 do
    local d = math.fmod(math.floor(a / digit), 1024)
    local s = rest * 1024 + d * b
    rest = math.fmod(s, c)
    q = q * 1024 + (s - rest) / c
    digit = digit / 1024
  end
  rest = rest + r
  if rest >= c then
    return q + 1, rest - c
  end
  return q, rest
end

-- A bucket is four doubles: used, time, credit, leased.
local function parse(v)
  if not v then
    return 0, 0, 0, 0
  end
  return unpack_('<dddd', v)
end

-- What is used now, the credit, and the time of both.
local function decay(used, t, credit, rate, period)
  if used == 0 then
    return 0, math.max(t, now), 0
  elseif now <= t then
    return used, t, credit
  elseif rate == 0 then
    return used, now, credit
  end
  local e = math.min(now - t, 1125899906842624)
  local r = math.fmod(rate, period)
  local q = (rate - r) / period
  if e * q >= used then
    return 0, now, 0
  end
  local gain, rest = muldiv(e, r, period, math.fmod(credit, period))
  gain = gain + e * q
  if gain >= used then
    return 0, now, 0
  end
  return used - gain, now, rest
end

local function write(key, used, t, credit, leased, rate, period, keep)
  local ttl = keep
  if leased > 0 then
    ttl = math.max(keep, LEASED) -- its shares are known while they are out
  end
  if rate > 0 then
    ttl = math.min(math.ceil(used / rate * period / 1000 * 1.001) + ttl, LONGEST)
  end
  call('SET', key, pack('<dddd', used, t, credit, leased), 'PX', str(ttl))
end

-- Gives an amount of a bucket back. Decay and this commute, so it needs no rate.
local function give_back(key, amount, leased)
  local v = call('GET', key)
  if v then
    local u, t, c, l = parse(v)
    call('SET', key, pack('<dddd', math.max(u - amount, 0), t, c, math.max(l - leased, 0)), 'KEEPTTL')
  end
end

-- A record is "s" when settled, "l <sequence> <held> <bucket>" of a lease, or
-- "r <ms to remember>" and a line "<amount> <key>" for each charge.
local function entries(rec)
  return string.gmatch(rec, '\n(%d+) ([^\n]+)')
end

local function release(rec, id)
  for amount, key in entries(rec) do
    if sub(key, 1, 2) == 'c:' then
      call('ZREM', P .. key, id)
    else
      give_back(P .. key, tonumber(amount), 0)
    end
  end
end

local function sweep()
  local due = call('ZRANGEBYSCORE', X, '-inf', str(now), 'LIMIT', 0, SWEEP)
  for _, name in ipairs(due) do
    local rec = call('GET', P .. name)
    local kind = rec and sub(rec, 1, 1)
    if kind == 'r' then
      release(rec, sub(name, 3))
      call('DEL', P .. name)
    elseif kind == 'l' then
      local sequence, held, key = string.match(rec, '^l (%d+) (%d+) (.+)$')
      held = tonumber(held)
      give_back(P .. key, held, held)
      call('SET', P .. name, 'l ' .. sequence .. ' 0 ' .. key, 'KEEPTTL')
    end
    call('ZREM', X, name)
  end
end

-- Reads a record (unless k is 0) and n buckets whose keys are KEYS[k], KEYS[k+step],
-- ... and whose specifications begin at A[a]: whether it is a set, capacity, rate,
-- period (us), debt, keep (ms), whether it is a shadow, and what the call adds,
-- `width` in all.
local function load(n, k, step, a, width, record)
  local keys = {}
  for i = 1, n do
    keys[i] = KEYS[k + (i - 1) * step]
  end
  keys[n + 1] = record
  -- A set reads as false here.
  local values = call('MGET', unpack(keys))
  local out = {}
  for i = 1, n do
    local b = {key = keys[i], set = A[a] == 1, capacity = A[a + 1], rate = A[a + 2], period = A[a + 3], debt = A[a + 4],
      keep = A[a + 5], shadow = A[a + 6] == 1, first = 0, refused = 0, leased = 0, credit = 0}
    if b.set then
      call('ZREMRANGEBYSCORE', b.key, '-inf', str(now))
      b.used = call('ZCARD', b.key)
      if b.used > 0 then
        b.first = tonumber(call('ZRANGE', b.key, 0, 0, 'WITHSCORES')[2])
      end
    else
      local u, t, c, l = parse(values[i])
      b.used, b.t, b.credit = decay(u, t, c, b.rate, b.period)
      b.leased = l
    end
    out[i] = b
    a = a + width
  end
  return out, values[n + 1]
end

local function save(b)
  write(b.key, b.used, b.t, b.credit, b.leased, b.rate, b.period, b.keep)
end

local function answer(outcome, buckets)
  local out = {now, outcome}
  for _, b in ipairs(buckets) do
    out[#out + 1] = b.used
    out[#out + 1] = b.credit
    out[#out + 1] = b.leased
    out[#out + 1] = b.first
    out[#out + 1] = b.refused
  end
  return out
end

local WIDTH = 8 -- numbers of a charge: the specification and an amount

-- KEYS: expiries, record, buckets. Numbers: ttl (us), ms to remember, charges.
-- Then the id.
local function reserve()
  local id, ttl, retain = ARGV[4], A[FIRST], A[FIRST + 1]
  sweep()
  local n, a = #KEYS - 2, FIRST + 2
  local buckets, rec = load(n, 3, 1, a, WIDTH, KEYS[2])
  if rec then
    return answer(rec == 's' and 3 or 2, buckets)
  end
  local granted = 1
  for i, b in ipairs(buckets) do
    b.amount = A[a + i * WIDTH - 1]
    if b.capacity - b.used < math.max(b.amount, 1) then
      b.refused = 1
      if not b.shadow then
        granted = 0
      end
    end
  end
  if granted == 0 then
    return answer(0, buckets)
  end
  local record = {'r ' .. str(retain)}
  local expires = str(now + ttl)
  for _, b in ipairs(buckets) do
    if b.refused == 0 then
      record[#record + 1] = str(b.amount) .. ' ' .. sub(b.key, #P + 1)
      if b.set then
        call('ZADD', b.key, expires, id)
        call('PEXPIRE', b.key, str(LONGEST))
        b.used = b.used + 1
        b.first = b.first == 0 and now + ttl or math.min(b.first, now + ttl)
      elseif b.amount > 0 then
        b.used = b.used + b.amount
        save(b)
      end
    end
  end
  call('SET', KEYS[2], table.concat(record, '\n'), 'PX', str(math.ceil(ttl / 1000) + retain))
  call('ZADD', X, expires, sub(KEYS[2], #P + 1))
  call('PEXPIRE', X, str(LONGEST))
  return answer(1, buckets)
end

-- As reserve, without ttl and time to remember.
local function commit()
  local id, a = ARGV[4], FIRST
  sweep()
  local buckets, rec = load(#KEYS - 2, 3, 1, a, WIDTH, KEYS[2])
  if rec == 's' then
    return answer(3, buckets)
  end
  local reserved = {}
  for amount, key in entries(rec or '') do
    reserved[P .. key] = tonumber(amount)
  end
  for i, b in ipairs(buckets) do
    local was = reserved[b.key]
    reserved[b.key] = nil
    if b.set then
      b.used = b.used - call('ZREM', b.key, id)
      local first = call('ZRANGE', b.key, 0, 0, 'WITHSCORES')[2]
      b.first = first and tonumber(first) or 0
    elseif was or not (rec and b.shadow) then
      -- A shadow charge that did not fit stays uncharged.
      local delta = A[a + i * WIDTH - 1] - (was or 0)
      if delta ~= 0 then
        b.used = math.max(math.min(b.used + delta, b.capacity + b.debt), 0)
        if b.used == 0 then
          b.credit = 0
        end
        save(b)
      end
    end
  end
  for key, amount in pairs(reserved) do
    if sub(key, #P + 1, #P + 2) == 'c:' then
      call('ZREM', key, id)
    else
      give_back(key, amount, 0)
    end
  end
  call('SET', KEYS[2], 's', 'PX', str(REMEMBERED))
  call('ZREM', X, sub(KEYS[2], #P + 1))
  return answer(1, buckets)
end

-- KEYS: expiries, record. Then the id.
local function free()
  sweep()
  local rec = call('GET', KEYS[2])
  local had = 0
  if rec and rec ~= 's' then
    release(rec, ARGV[4])
    call('ZREM', X, sub(KEYS[2], #P + 1))
    had = 1
  end
  if rec ~= 's' then
    call('SET', KEYS[2], 's', 'PX', str(REMEMBERED))
  end
  return {now, had}
end

-- KEYS: expiries, records. Number: ttl (us). Then the ids.
local function extend()
  sweep()
  local ttl = A[FIRST]
  local expires = str(now + ttl)
  local out = {now, 1}
  for i = 2, #KEYS do
    local name, id = sub(KEYS[i], #P + 1), ARGV[2 + i]
    local rec = call('GET', KEYS[i])
    local due = call('ZSCORE', X, name)
    if rec and sub(rec, 1, 1) == 'r' and due and tonumber(due) > now then
      call('ZADD', X, 'XX', expires, name)
      for _, key in entries(rec) do
        if sub(key, 1, 2) == 'c:' then
          call('ZADD', P .. key, 'XX', expires, id)
        end
      end
      call('PEXPIRE', KEYS[i], str(math.ceil(ttl / 1000) + string.match(rec, '^r (%d+)')))
      out[#out + 1] = 1
    else
      out[#out + 1] = 0
    end
  end
  return out
end

-- KEYS: expiries, buckets. Numbers: specifications, each with a 0.
local function read()
  sweep()
  return answer(1, load(#KEYS - 1, 2, 1, FIRST, WIDTH))
end

-- KEYS: expiries, then a record and a bucket for each share. Numbers: ttl (us), ms
-- to remember, and for each share the specification, the most that may be
-- leased, sequence, spent and want.
local function lease()
  sweep()
  local ttl, retain = A[FIRST], A[FIRST + 1]
  local n, a, width = (#KEYS - 1) / 2, FIRST + 2, 11
  local out = {now, 1}
  local buckets = load(n, 3, 2, a, width)
  for i, b in ipairs(buckets) do
    local at = a + (i - 1) * width + 7
    local most, sequence, spent, want = A[at], A[at + 1], A[at + 2], A[at + 3]
    local record = KEYS[i * 2]
    local rec = call('GET', record)
    local seen, held = string.match(rec or '', '^l (%d+) (%d+)')
    held = tonumber(held or 0)
    local low = b.capacity - b.used < math.max(math.floor(b.capacity / LOW), 1)
    if not seen or sequence > tonumber(seen) then
      if spent > held then
        b.used = math.min(b.used + spent - held, b.capacity + b.debt)
        b.leased = math.max(b.leased - held, 0)
        held = 0
      else
        b.leased = math.max(b.leased - spent, 0)
        held = held - spent
      end
      local change = want - held
      if change > 0 then
        local room = b.capacity - b.used
        low = room < math.max(math.floor(b.capacity / LOW), 1)
        change = low and 0 or math.max(math.min(change, math.floor(room / SHARE), most - b.leased), 0)
      end
      b.used = math.max(b.used + change, 0)
      b.leased = math.max(b.leased + change, 0)
      held = held + change
      if b.used == 0 then
        b.credit = 0
      end
      save(b)
      local name = sub(record, #P + 1)
      call('SET', record, 'l ' .. str(sequence) .. ' ' .. str(held) .. ' ' .. sub(b.key, #P + 1), 'PX', str(math.ceil(ttl / 1000) + retain))
      if held > 0 then
        call('ZADD', X, str(now + ttl), name)
      else
        call('ZREM', X, name)
      end
    end
    out[#out + 1] = held
    out[#out + 1] = low and 1 or 0
    out[#out + 1] = b.used
    out[#out + 1] = b.credit
    out[#out + 1] = b.leased
  end
  call('PEXPIRE', X, str(LONGEST))
  return out
end

-- KEYS: holders. Number: us a holder counts for. Then names.
local function holders()
  for i = 4, #ARGV do
    call('ZADD', X, str(now + A[FIRST]), ARGV[i])
  end
  call('ZREMRANGEBYSCORE', X, '-inf', str(now))
  call('PEXPIRE', X, str(LONGEST))
  return {now, call('ZCARD', X)}
end

local calls = {reserve = reserve, commit = commit, release = free, extend = extend, read = read, lease = lease, holders = holders}
return calls[ARGV[1]]()
