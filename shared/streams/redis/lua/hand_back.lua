-- Give a claim up. KEYS: stream. ARGV: entry, consumer, deliveries. Returns 1, or 0 if the claim is lost.
if not holds(KEYS[1], ARGV[1], ARGV[2], ARGV[3]) then return 0 end
put_aside(KEYS[1], HANDED_BACK, ARGV[1], ARGV[3])
return 1
