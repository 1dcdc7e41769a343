// Numbers and times as people read them.
export function number(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size < 1e-12) return "0";
  if (size >= 1e9) return `${(value / 1e9).toPrecision(digits)}G`;
  if (size >= 1e6) return `${(value / 1e6).toPrecision(digits)}M`;
  if (size >= 1e4) return `${(value / 1e3).toPrecision(digits)}k`;
  if (Number.isInteger(value)) return String(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(digits - 1);
  return String(Number(value.toPrecision(digits)));
}

/** Labels of an axis: as many digits as tell its ticks apart. */
export function ticks(values: readonly (number | null)[]): string[] {
  const known = values.filter((each) => each !== null);
  const gaps = known.slice(1).map((each, at) => Math.abs(each - known[at]!));
  const gap = Math.min(...gaps.filter((each) => each > 0));
  const largest = Math.max(...known.map(Math.abs));
  return values.map((value) => {
    if (value === null) return "";
    if (!Number.isFinite(gap) || largest >= 1e4) return number(value);
    if (value !== 0 && largest < 1e-3) return value.toExponential(Math.max(0, Math.ceil(Math.log10(Math.abs(value) / gap) - 0.01))).replace(/\.0+e/, "e");
    return value.toFixed(Math.min(6, Math.max(0, Math.ceil(-Math.log10(gap) - 0.01))));
  });
}

export function percent(value: number | null | undefined): string {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`;
}

export function duration(seconds: number | null): string {
  if (seconds === null || !Number.isFinite(seconds)) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 100) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function clock(at: string): string {
  const time = new Date(at);
  const day = time.toDateString() === new Date().toDateString() ? "" : `${time.toLocaleDateString()} `;
  return day + time.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
}

export function plural(count: number, word: string): string {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}
