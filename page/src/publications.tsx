// How each version came to the rollouts: what its parts took, by which ways, to whom, and what went wrong.
import { useRef } from "preact/hooks";
import { call, experimentPath, usePoll, type Event, type EventPage } from "./api";
import { clock, duration } from "./format";
import { SeriesOf } from "./series";

const SHOWN = 20;
const PARTS = [
  ["publication/prepare_seconds", "negotiate"],
  ["publication/transfer_seconds", "transfer"],
  ["publication/commit_seconds", "commit"],
] as const;
const TYPES = "publication_announced,publication_committed,publication_aborted,publication_epoch_closed,publication_served";

interface Row {
  version: number;
  at: string;
  members: string[];
  took: Record<string, Record<string, number>>;
  transports: string[];
  end: string;
  isBad: boolean;
  seconds: number[];
}

function rowsOf(events: Event[], series: SeriesOf): Row[] {
  const rows = new Map<number, Row>();
  for (const each of events) {
    const data = each.data as Record<string, unknown>;
    const version = data.version as number;
    const before = rows.get(version) ?? { version, at: each.at, members: [], took: {}, transports: [], end: "under way", isBad: false, seconds: [] };
    if (each.type === "publication_served") {
      rows.set(version, { ...before, took: data.members as Row["took"] });
      continue;
    }
    const members = (data.members as string[] | undefined) ?? before.members;
    const because = typeof data.reason === "string" && data.reason ? `: ${data.reason}` : "";
    if (each.type === "publication_announced") rows.set(version, { ...before, at: each.at, members, transports: (data.transports as string[] | undefined) ?? [] });
    else if (each.type === "publication_committed") rows.set(version, { ...before, members, end: `served by ${members.length}${because}` });
    else rows.set(version, { ...before, end: `${each.type === "publication_aborted" ? "aborted" : "a member was left out"}${because}`, isBad: true });
  }
  const newest = [...rows.values()].sort((one, other) => other.version - one.version).slice(0, SHOWN);
  return newest.map((row) => ({
    ...row,
    seconds: PARTS.map(([name]) => {
      const column = series.get(name);
      const at = column ? column.versions.lastIndexOf(row.version) : -1;
      return at < 0 ? 0 : column!.values[at]!;
    }),
  }));
}

const short = (seconds: number) => (seconds < 0.1 ? `${Math.round(1000 * seconds)} ms` : duration(seconds));

/** Who took part, and what each of the parts took of them: the slowest first. */
function Members({ row }: { row: Row }) {
  const names = row.members.length > 4 ? `${row.members.length} rollouts` : row.members.join(", ");
  const took = Object.entries(row.took);
  if (took.length === 0) return <>{names}</>;
  return (
    <details>
      <summary>{names || `${took.length} rollouts`}</summary>
      <ul>
        {took.map(([name, parts]) => (
          <li key={name}>
            {name}:{" "}
            {Object.entries(parts)
              .map(([part, seconds]) => `${part} ${short(seconds)}`)
              .join(", ")}
          </li>
        ))}
      </ul>
    </details>
  );
}

export function Publications({ id, isOver, of }: { id: string; isOver: boolean; of?: string }) {
  const kept = useRef<{ events: Event[]; after: string | null; series: SeriesOf } | null>(null);
  const { data, error } = usePoll(
    async (signal) => {
      const known = (kept.current ??= { events: [], after: null, series: new SeriesOf(id, PARTS.map(([name]) => name), 2000) });
      await known.series.update(signal);
      for (;;) {
        const page = await call<EventPage>(`${experimentPath(id)}/log`, { query: { types: TYPES, after: known.after, limit: 1000 }, signal });
        if (signal.aborted) break;
        known.events = [...known.events, ...page.items].slice(-10 * SHOWN);
        known.after = page.next ?? known.after;
        if (page.items.length < 1000) break;
      }
      return rowsOf(known.events, known.series);
    },
    isOver ? 60 : 5,
    id,
  );
  const longest = Math.max(1e-9, ...(data ?? []).map((row) => row.seconds.reduce((sum, each) => sum + each, 0)));
  return (
    <div class="panel publications">
      <h2>Publications{of && ` of ${of}`}</h2>
      {error && <p class="notice bad">{error.message}</p>}
      {data?.length === 0 && <p class="quiet">No version was published yet.</p>}
      {data !== null && data.length > 0 && (
        <>
          <p class="small">
            {PARTS.map(([, label], at) => (
              <span key={label}>
                <i class={`ink ink-${at}`} /> {label}{" "}
              </span>
            ))}
            <span class="quiet">of the newest {data.length} versions</span>
          </p>
          <table>
            <thead>
              <tr>
                <th scope="col">Version</th>
                <th scope="col">At</th>
                <th scope="col">Time</th>
                {PARTS.map(([, label]) => (
                  <th scope="col" key={label}>
                    {label}
                  </th>
                ))}
                <th scope="col">By</th>
                <th scope="col">Members</th>
                <th scope="col">End</th>
              </tr>
            </thead>
            <tbody>
              {data.map((row) => {
                let from = 0;
                return (
                  <tr key={row.version}>
                    <td>{row.version}</td>
                    <td class="quiet">{clock(row.at)}</td>
                    <td>
                      <svg class="lane" viewBox="0 0 100 20" preserveAspectRatio="none" role="img" aria-label={`version ${row.version}: ${PARTS.map(([, label], at) => `${label} ${duration(row.seconds[at]!)}`).join(", ")}`}>
                        {row.seconds.map((value, at) => {
                          const start = from;
                          from += (100 * value) / longest;
                          return <rect key={at} class={`fill-${at}`} x={start} y={3} width={from - start} height={14} />;
                        })}
                      </svg>
                    </td>
                    {row.seconds.map((value, at) => (
                      <td key={at} class="figure">
                        {short(value)}
                      </td>
                    ))}
                    <td class="quiet">{row.transports.join(", ")}</td>
                    <td class="wrap quiet small">
                      <Members row={row} />
                    </td>
                    <td class={row.isBad ? "wrap bad" : "wrap"}>{row.end}</td>
                  </tr>
                );
              })}
            </tbody>
          </table>
        </>
      )}
      <p class="quiet small">
        <code>GET {experimentPath(id)}/series?names=publication/*</code>, <code>GET {experimentPath(id)}/log?types=publication_committed,…</code>
      </p>
    </div>
  );
}
