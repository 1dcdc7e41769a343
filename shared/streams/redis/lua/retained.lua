-- Measure the scored stream, and what only a checkpoint removes from it. KEYS: scored stream, ledger, state.
-- Returns {bytes, most bytes or -1, entries, planned entries}.
return {
  bytes_of(KEYS[1]),
  tonumber(redis.call('HGET', KEYS[3], 'stream_bytes') or '-1'),
  redis.call('XLEN', KEYS[1]),
  tonumber(redis.call('HGET', KEYS[2], 'planned') or '0'),
}
