// What the processes logged last, asked of them while this is open.
import { useState } from "preact/hooks";
import { call, experimentPath, usePoll, type ServiceLogLines } from "./api";
import { clock } from "./format";

const LEVELS = ["debug", "info", "warning", "error"] as const;
const SEVERE = new Set(["error", "critical"]);

/** The newest lines of an experiment's services, or of one service. */
export function ServiceLog({ experimentId, serviceId }: { experimentId?: string; serviceId?: string }) {
  const [level, setLevel] = useState<string>("info");
  const [text, setText] = useState("");
  const [service, setService] = useState("");
  const [isOpen, setOpen] = useState(false);
  const path = experimentId ? `${experimentPath(experimentId)}/logs` : `/v1/services/${encodeURIComponent(serviceId!)}/logs`;
  const { data, error } = usePoll(
    async (signal) => (isOpen ? call<ServiceLogLines>(path, { query: { level, containing: text, service: experimentId ? service : null, lines: 300 }, signal }) : null),
    isOpen ? 5 : Infinity,
    `${path} ${level} ${text} ${service} ${isOpen}`,
  );
  const [known, setKnown] = useState<string[]>([]);
  const items = data?.items ?? [];
  const found = [...new Set([...known, ...items.map((each) => each.service_id), ...Object.keys(data?.unread ?? {})])].sort();
  if (found.length > known.length) setKnown(found);
  return (
    <details class="panel log" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>
        <h2>What the services logged</h2>
      </summary>
      <div class="toolbar">
        {experimentId && (
          <label>
            Service{" "}
            <select value={service} onChange={(event) => setService(event.currentTarget.value)}>
              <option value="">all</option>
              {known.map((each) => (
                <option key={each}>{each}</option>
              ))}
            </select>
          </label>
        )}
        <label>
          At least{" "}
          <select value={level} onChange={(event) => setLevel(event.currentTarget.value)}>
            {LEVELS.map((each) => (
              <option key={each}>{each}</option>
            ))}
          </select>
        </label>
        <label>
          Containing <input value={text} maxLength={200} onChange={(event) => setText(event.currentTarget.value)} />
        </label>
      </div>
      {error && <p class="notice bad">{error.message}</p>}
      {isOpen && data === null && !error && <p class="quiet">Loading…</p>}
      {Object.entries(data?.unread ?? {}).map(([id, why]) => (
        <p key={id} class="small bad">
          {id} did not say: {why}
        </p>
      ))}
      {data && items.length === 0 && <p class="quiet">Nothing of this kind is kept. Each process keeps its newest lines in memory; a process that has ended takes them along.</p>}
      <table>
        <tbody>
          {items.toReversed().map((each, at) => (
            <tr key={at}>
              <td>{each.at ? clock(each.at) : ""}</td>
              <td class="quiet">{each.service_id}</td>
              <td class="quiet">{each.process}</td>
              <td class={SEVERE.has(each.level ?? "") ? "bad" : each.level === "warning" ? "warn" : ""}>{each.level}</td>
              <td class="wrap words">
                {each.message} <span class="quiet">{each.facts}</span>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
      <p class="quiet small">
        <code>GET {path}</code>
      </p>
    </details>
  );
}
