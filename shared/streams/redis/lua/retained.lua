-- Measure the scored stream, and what only a checkpoint removes from it. KEYS: scored stream, ledger, state.
-- Returns {bytes, most bytes or -1, entries, planned entries}.
local stream, ledger, state = unpack(KEYS)
return {
  bytes_of(stream),
  tonumber(redis.call('HGET', state, 'stream_bytes') or '-1'),
  redis.call('XLEN', stream),
  tonumber(redis.call('HGET', ledger, 'planned') or '0'),
}
