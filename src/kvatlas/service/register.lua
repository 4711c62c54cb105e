#!lua name=@LIBRARY@

-- The register of a cluster as functions of Valkey or Redis. What each does is said in
-- core/register.py, and a test holds both against each other. KEYS and ARGV are as
-- service/register_calls.py sends them, and each answers {now_ms, kind, ...}. Whatever has an end
-- or an owner lies in an order by it, so that nothing looks at all records.

local now = 0

local function text(number)
  return string.format('%.0f', number)
end

local function refused(why, about)
  return {now, 'refused', why, about or ''}
end

-- The next revision of members, floors or tenants: a time, or more than the last.
local function turn(head, what)
  local revision = math.max(tonumber(redis.call('HGET', head, what) or 0) + 1, now)
  redis.call('HSET', head, what, text(revision))
  return revision
end

local function revision_of(head, what)
  return tonumber(redis.call('HGET', head, what) or 0)
end

-- Packed lists in a hash; nil where there is none.
local function load(key, field)
  local data = redis.call('HGET', key, field)
  return data and cmsgpack.unpack(data)
end

local function save(key, field, list)
  redis.call('HSET', key, field, cmsgpack.pack(list))
end

-- members: {life, url, replaced, as it was told}; their ends by time ------------------------------

local function bury(head, members, ends)
  local over = redis.call('ZRANGEBYSCORE', ends, '-inf', text(now))
  if #over > 0 then
    redis.call('HDEL', members, unpack(over))
    redis.call('ZREM', ends, unpack(over))
    turn(head, 'members')
  end
end

local function stranger(head, known, life, url, identity, clock_ms, format)
  local ours = redis.call('HMGET', head, 'identity', 'format')
  if ours[1] and ours[1] ~= identity then
    return refused('other_cluster')
  end
  if ours[2] and ours[2] ~= format then
    return refused('other_format', ours[2])
  end
  local apart_ms = tonumber(clock_ms) - now
  if math.abs(apart_ms) > @CLOCK_APART_MS@ then
    return refused('clock_apart', text(apart_ms))
  end
  -- Who listens at the same place has followed it, unless two believe so in turn.
  if known and known[1] ~= life and (known[2] ~= url or known[3] == life) then
    return refused('name_taken', known[2])
  end
end

local function join(keys, argv)
  local head, members, ends = keys[1], keys[2], keys[3]
  local name, life, url, told, identity = argv[1], argv[2], argv[3], argv[4], argv[5]
  local ttl_ms, clock_ms, format, seen, candidate = argv[6], argv[7], argv[8], argv[9], argv[10]
  bury(head, members, ends)
  local known = load(members, name)
  local fault = stranger(head, known, life, url, identity, clock_ms, format)
  if fault then
    return fault
  end
  if not known and redis.call('HLEN', members) >= @MEMBERS_MAX@ then
    return refused('full', '@MEMBERS_MAX@ members')
  end
  redis.call('HSETNX', head, 'created', candidate)
  redis.call('HSETNX', head, 'born_ms', text(now))
  redis.call('HSET', head, 'identity', identity, 'format', format)
  local replaced = known and known[3] or ''
  if known and known[1] ~= life then
    replaced = known[1]
  end
  if not known or known[4] ~= told then
    turn(head, 'members')
    save(members, name, {life, url, replaced, told})
  end
  redis.call('ZADD', ends, text(now + tonumber(ttl_ms)), name)
  local revision = revision_of(head, 'members')
  local all = false
  if tonumber(seen) ~= revision then
    all = {}
    for i, data in ipairs(redis.call('HVALS', members)) do
      all[i] = cmsgpack.unpack(data)[4]
    end
  end
  local created = redis.call('HGET', head, 'created')
  local floors, tenants = revision_of(head, 'floors'), revision_of(head, 'tenants')
  return {now, 'joined', created, revision, floors, tenants, all}
end

local function leave(keys, argv)
  local head, members, ends, leases = keys[1], keys[2], keys[3], keys[4]
  local name, life = argv[1], argv[2]
  bury(head, members, ends)
  local known = load(members, name)
  if not known or known[1] ~= life then
    return refused('not_a_member')
  end
  redis.call('HDEL', members, name)
  redis.call('ZREM', ends, name)
  for _, what in ipairs(redis.call('HKEYS', leases)) do
    local lease = load(leases, what)
    if lease[2] == name and lease[3] == life then
      save(leases, what, {lease[1], name, life, 0})
    end
  end
  return {now, 'done', turn(head, 'members')}
end

-- leases: {token, name, life, until when} ----------------------------------------------------------

local function acquire(keys, argv)
  local head, members, ends, leases = keys[1], keys[2], keys[3], keys[4]
  local what, name, life = argv[1], argv[2], argv[3]
  local ttl_ms, above = tonumber(argv[4]), tonumber(argv[5])
  bury(head, members, ends)
  local known = load(members, name)
  if not known or known[1] ~= life then
    return refused('not_a_member')
  end
  if now < tonumber(redis.call('HGET', head, 'born_ms')) + ttl_ms then
    return refused('held')
  end
  local lease = load(leases, what)
  if not lease then
    if redis.call('HLEN', leases) >= @LEASES_MAX@ then
      return refused('full', '@LEASES_MAX@ leases')
    end
    lease = {0, '', '', 0}
  end
  local same = lease[2] == name and lease[3] == life
  if lease[4] > now and not same then
    return refused('held', lease[2])
  end
  local token = lease[1]
  if lease[4] <= now or above > token then
    token = math.max(token + 1, above + 1, now)
  end
  save(leases, what, {token, name, life, now + ttl_ms})
  return {now, 'held', token}
end

local function release(keys, argv)
  local leases = keys[4]
  local lease = load(leases, argv[1])
  if not lease or lease[2] ~= argv[2] or lease[3] ~= argv[3] then
    return refused('not_a_member')
  end
  save(leases, argv[1], {lease[1], lease[2], lease[3], 0})
  return {now, 'done', 0}
end

-- floors: tenant NUL session → before; tenants: one text -------------------------------------------

local function raise(keys, argv)
  local head, floors = keys[1], keys[2]
  local function has(at)
    local before = redis.call('HGET', floors, argv[at] .. '\0' .. argv[at + 1])
    return before and tonumber(before) >= tonumber(argv[at + 2])
  end
  local new = {}
  for at = 1, #argv, 3 do
    if not has(at) then
      new[#new + 1] = at
    end
  end
  if redis.call('HLEN', floors) + #new > @FLOORS_MAX@ then
    return refused('full', '@FLOORS_MAX@ floors')
  end
  for _, at in ipairs(new) do
    if not has(at) then
      redis.call('HSET', floors, argv[at] .. '\0' .. argv[at + 1], argv[at + 2])
    end
  end
  return {now, 'done', #new > 0 and turn(head, 'floors') or revision_of(head, 'floors')}
end

local function ask_floors(keys, argv)
  local revision = revision_of(keys[1], 'floors')
  local new = tonumber(argv[1]) ~= revision
  return {now, 'floors', revision, new and redis.call('HGETALL', keys[2])}
end

local function put_tenants(keys, argv)
  local head, tenants = keys[1], keys[3]
  local expected, offered = tonumber(argv[2]), tonumber(argv[3])
  local revision = revision_of(head, 'tenants')
  if offered > revision then
    redis.call('HSET', head, 'tenants', text(offered))
  elseif expected == revision then
    turn(head, 'tenants')
  else
    return refused('stale', text(revision))
  end
  redis.call('SET', tenants, argv[1])
  return {now, 'done', revision_of(head, 'tenants')}
end

local function ask_tenants(keys, argv)
  local revision = revision_of(keys[1], 'tenants')
  local new = tonumber(argv[1]) ~= revision
  return {now, 'tenants', revision, new and (redis.call('GET', keys[3]) or '')}
end

-- stores: records {owner, size, data} by key; ends: key by time; owners: owner NUL key, in order ---

-- Tag, epoch and session of an owner; nil where it is none of that form.
local function read(owner)
  local tag, epoch, session = string.match(owner, '^([^.]*)%.([^.]*)%.?(.*)$')
  local _, chars = string.gsub(tag or '', '[^\128-\191]', '')
  if tag and chars == @TAG_CHARS@ then
    return tag, string.match(epoch, '^%d+$') and tonumber(epoch), session
  end
end

local function payer_of(owner)
  return read(owner) or owner
end

local function forgotten(floors, owner)
  local tag, epoch, session = read(owner)
  if not tag or not epoch then
    return false
  end
  local before = redis.call('HGET', floors, tag .. '\0')
  if before and epoch < tonumber(before) then
    return true
  end
  return session ~= '' and redis.call('HEXISTS', floors, tag .. '\0' .. session) == 1
end

local function charge(used, owner, size)
  local payer = payer_of(owner)
  if size ~= 0 and redis.call('HINCRBY', used, payer, text(size)) == 0 then
    redis.call('HDEL', used, payer)
  end
end

local function drop(keys, gone)
  local records, ends, owners, used = keys[3], keys[4], keys[5], keys[6]
  for _, key in ipairs(gone) do
    local record = load(records, key)
    if record then
      redis.call('HDEL', records, key)
      redis.call('ZREM', ends, key)
      redis.call('ZREM', owners, record[1] .. '\0' .. key)
      charge(used, record[1], -record[2])
    end
  end
end

-- A question to a store: its generation is looked up, and some of what is over goes first.
local function of_store(ask)
  return function(keys, argv)
    local stores, store = keys[2], argv[1]
    local generation = tonumber(redis.call('HGET', stores, store) or 0)
    if generation == 0 then
      if redis.call('HLEN', stores) >= @STORES_MAX@ then
        return refused('full', '@STORES_MAX@ stores')
      end
      generation = now -- it rises over an empty register
      redis.call('HSET', stores, store, text(now))
    end
    local limit = {'LIMIT', 0, @COMMITS_MAX@}
    drop(keys, redis.call('ZRANGEBYSCORE', keys[4], '-inf', text(now), unpack(limit)))
    return ask(keys, argv, generation)
  end
end

-- Why it is not taken; false: it is.
local function refusal(keys, record, quotas)
  if forgotten(keys[1], record.owner) then
    return 'forgotten'
  end
  if redis.call('HEXISTS', keys[3], record.key) == 1 then
    return false
  end
  local full = redis.call('HLEN', keys[3]) >= @RECORDS_MAX@
  if full or #record.data > @RECORD_BYTES_MAX@ then
    return 'full'
  end
  local payer = payer_of(record.owner)
  local quota = quotas[payer] or -1
  local used = tonumber(redis.call('HGET', keys[6], payer) or 0) + record.size
  return quota >= 0 and used > quota and 'over_quota'
end

local function keep(keys, record, until_ms)
  local records, ends, owners, used = keys[3], keys[4], keys[5], keys[6]
  if redis.call('HEXISTS', records, record.key) == 0 then
    charge(used, record.owner, record.size)
    save(records, record.key, {record.owner, record.size, record.data})
    redis.call('ZADD', owners, 0, record.owner .. '\0' .. record.key)
    if until_ms > 0 then
      redis.call('ZADD', ends, text(until_ms), record.key)
    end
  elseif until_ms == 0 then
    redis.call('ZREM', ends, record.key)
  else -- who said so first pays; without an end it stays so
    redis.call('ZADD', ends, 'XX', 'GT', text(until_ms), record.key)
  end
end

local function commit(keys, argv, generation)
  local ttl_ms, quotas, at = tonumber(argv[3]), {}, 5
  for _ = 1, tonumber(argv[4]) do
    quotas[argv[at]] = tonumber(argv[at + 1])
    at = at + 2
  end
  local why = {}
  for first = at, #argv, 4 do
    local record = {key = argv[first], owner = argv[first + 1], data = argv[first + 3]}
    record.size = tonumber(argv[first + 2])
    local no = tonumber(argv[2]) ~= generation and 'stale' or refusal(keys, record, quotas)
    if not no then
      keep(keys, record, ttl_ms > 0 and now + ttl_ms or 0)
    end
    why[#why + 1] = no or ''
  end
  return {now, 'committed', generation, why}
end

local function ask_records(keys, argv, generation)
  local data = {}
  for at = 2, #argv do
    local record = load(keys[3], argv[at])
    local ends = record and tonumber(redis.call('ZSCORE', keys[4], argv[at]) or now + 1)
    local counts = record and ends > now and not forgotten(keys[1], record[1])
    data[at - 1] = counts and record[3]
  end
  return {now, 'records', generation, data}
end

local function withdraw(keys, argv, generation)
  drop(keys, {unpack(argv, 2)})
  return {now, 'done', generation}
end

local function expire(keys, argv, generation)
  local meant = tonumber(argv[2])
  if meant >= generation then -- a higher one is of a register that has lost all since
    generation = meant + 1
    redis.call('UNLINK', keys[3], keys[4], keys[5], keys[6])
    redis.call('HSET', keys[2], argv[1], text(generation))
  end
  return {now, 'done', generation}
end

local function forget(keys, argv)
  local owners, tenant, before, session = keys[5], argv[2], tonumber(argv[3]), argv[4]
  local gone, left = {}, 0
  local function take(from, to)
    local room = @COMMITS_MAX@ - #gone
    local found = redis.call('ZRANGEBYLEX', owners, from, to, 'LIMIT', 0, room)
    for _, member in ipairs(found) do
      gone[#gone + 1] = string.sub(member, string.find(member, '%z') + 1)
    end
    left = left + redis.call('ZLEXCOUNT', owners, from, to) - #found
  end
  -- All of one tenant lie together, in it all of one epoch ('/' follows '.'): from one to the next.
  local from, to = '[' .. tenant .. '.', '(' .. tenant .. '/'
  while read(tenant .. '.') == tenant do
    local member = redis.call('ZRANGEBYLEX', owners, from, to, 'LIMIT', 0, 1)[1]
    if not member then
      break
    end
    local epoch = string.match(member, '^[^.%z]*', #tenant + 2)
    local owner = tenant .. '.' .. epoch
    local number = string.match(epoch, '^%d+$') and tonumber(epoch)
    if number and session ~= '' then
      take('[' .. owner .. '.' .. session .. '\0', '(' .. owner .. '.' .. session .. '\1')
    elseif number and number < before then
      take('[' .. owner .. '\0', '(' .. owner .. '\1')
      take('[' .. owner .. '.', '(' .. owner .. '/')
    end
    from = '[' .. owner .. '/'
  end
  drop(keys, gone)
  return {now, 'left', #gone, left}
end

local function ask_usage(keys, argv, generation)
  local records, used = redis.call('HLEN', keys[3]), redis.call('HGETALL', keys[6])
  return {now, 'usage', generation, records, used}
end

-- All by the server's clock. What can only grow a little is done in a full server, too: only
-- there can records go.
local function register(name, ask, flags)
  redis.register_function{
    function_name = '@LIBRARY@_' .. name,
    callback = function(keys, argv)
      local time = redis.call('TIME')
      now = time[1] * 1000 + math.floor(time[2] / 1000)
      return ask(keys, argv)
    end,
    flags = flags or {'allow-oom'},
  }
end

register('join', join)
register('leave', leave)
register('acquire', acquire)
register('release', release)
register('raise', raise)
register('ask_floors', ask_floors)
register('put_tenants', put_tenants, {})
register('ask_tenants', ask_tenants)
register('commit', of_store(commit), {})
register('ask_records', of_store(ask_records))
register('withdraw', of_store(withdraw))
register('expire', of_store(expire))
register('forget', of_store(forget))
register('ask_usage', of_store(ask_usage))
