// What happened, and who changed what.
import { useRef, useState } from "preact/hooks";
import { call, experimentPath, usePoll, type Event, type EventPage } from "./api";
import { Audit, auditOf, words } from "./audit";
import { clock } from "./format";
import type { Route, Shared } from "./main";
import { Profiles } from "./profiles";
import { Head } from "./run";
import { ServiceLog } from "./servicelog";

/** So many lines are drawn; the filter looks at all. */
const SHOWN = 500;
const TROUBLE = new Set([
  "service_failed",
  "service_left",
  "stalled",
  "rolled_back",
  "publication_aborted",
  "health_finding",
  "evaluation_failed",
  "evaluation_abandoned",
  "tracker_failed",
  "upload_failed",
  "training_job_ended",
]);

/** What is left of an experiment that has ended leaves in order. */
const isTrouble = (each: Event): boolean => TROUBLE.has(each.type) && each.data.reason !== "the experiment has ended";

export function Log({ id, route, shared }: { id: string; route: Route; shared: Shared }) {
  const experiment = shared.experiments.find((each) => each.id === id)!;
  const events = useRef<{ items: Event[]; after: string | null }>({ items: [], after: null });
  const isOver = ["completed", "stopped", "failed", "draft"].includes(experiment.state);
  const { data, error } = usePoll(
    async (signal) => {
      const kept = events.current;
      for (;;) {
        const page = await call<EventPage>(`${experimentPath(id)}/log`, { query: { after: kept.after, limit: 1000 }, signal });
        if (signal.aborted) break;
        kept.items.push(...page.items);
        kept.after = page.next ?? kept.after;
        if (page.items.length < 1000) break;
      }
      return { items: kept.items.slice(), audit: await auditOf(id, signal) };
    },
    isOver ? 30 : 3,
    id,
  );
  const type = route.query.get("type") ?? "";
  const [text, setText] = useState("");
  const items = data?.items ?? [];
  const types = [...new Set(items.map((each) => each.type))].sort();
  const found = items.filter(
    (each) => (type === "" || (type === "trouble" ? isTrouble(each) : each.type === type)) && (text === "" || `${each.type} ${JSON.stringify(each.data)}`.toLowerCase().includes(text.toLowerCase())),
  );
  return (
    <section>
      <Head experiment={experiment} shared={shared} ids={[id]} />
      {error && <p class="notice bad">{error.message}</p>}
      {data === null && !error && <p class="quiet">Loading…</p>}
      {data && (
        <>
          <Audit entries={data.audit} />
          <div class="panel">
            <div class="heading">
              <h2>What happened</h2>
              <div class="toolbar">
                <label>
                  Type{" "}
                  <select value={type} onChange={(event) => location.replace(`#/log/${encodeURIComponent(id)}${event.currentTarget.value ? `?type=${event.currentTarget.value}` : ""}`)}>
                    <option value="">all</option>
                    <option value="trouble">trouble only</option>
                    {types.map((each) => (
                      <option key={each}>{each}</option>
                    ))}
                  </select>
                </label>
                <label>
                  Containing <input value={text} onInput={(event) => setText(event.currentTarget.value)} />
                </label>
              </div>
            </div>
            <p class="quiet small">
              {found.length.toLocaleString("en")} of {items.length.toLocaleString("en")} events, newest first{found.length > SHOWN ? `; the newest ${SHOWN} are shown` : ""}.
            </p>
            <table>
              <tbody>
                {found
                  .slice(-SHOWN)
                  .reverse()
                  .map((each) => (
                    <tr key={each.id}>
                      <td>{clock(each.at)}</td>
                      <td class={isTrouble(each) ? "bad" : ""}>{each.type.replaceAll("_", " ")}</td>
                      <td class="wrap quiet">{words(each.data)}</td>
                    </tr>
                  ))}
              </tbody>
            </table>
          </div>
          <Profiles id={id} isOver={isOver} />
          <ServiceLog experimentId={id} />
        </>
      )}
    </section>
  );
}
