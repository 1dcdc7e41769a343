// What the model wrote: a list with its scatter, and one trajectory beside it.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { call, experimentPath, Refused, type Sample, type SamplePage } from "./api";
import { number } from "./format";
import type { Route, Shared } from "./main";
import { Head } from "./run";
import { Scatter } from "./scatter";
import { Trajectory } from "./trajectory";

const PAGE = 100;
const KINDS = ["trained", "filtered", "dropped", "failed", "evaluation"];

export function Samples({ id, route, shared }: { id: string; route: Route; shared: Shared }) {
  const experiment = shared.experiments.find((each) => each.id === id)!;
  const query = route.query;
  const set = (changes: Record<string, string | null>) => {
    const next = new URLSearchParams(query);
    for (const [name, value] of Object.entries(changes)) {
      if (value === null || value === "") next.delete(name);
      else next.set(name, value);
    }
    location.replace(`#/samples/${encodeURIComponent(id)}${next.size > 0 ? `?${next}` : ""}`);
  };
  const filters = {
    kind: query.get("kind"),
    step: query.get("step"),
    row: query.get("row"),
    group: query.get("group"),
    min_reward: query.get("min"),
    max_reward: query.get("max"),
    order: query.get("order"),
    failed: query.get("failed"),
  };
  const key = JSON.stringify([id, filters]);
  const [page, setPage] = useState<{ key: string; items: Sample[]; next: string | null; unread: number } | null>(null);
  const [error, setError] = useState("");
  const [again, setAgain] = useState(0);
  const load = async (after: string | null, signal: AbortSignal) => {
    try {
      const found = await call<SamplePage>(`${experimentPath(id)}/samples`, { query: { ...filters, after, limit: PAGE }, signal });
      setError("");
      setPage((old) => ({
        key,
        items: after !== null && old?.key === key ? [...old.items, ...found.items] : found.items,
        next: found.next ?? null,
        unread: found.num_unread ?? 0,
      }));
    } catch (reason) {
      if (!signal.aborted) setError(reason instanceof Refused ? reason.message : String(reason));
    }
  };
  const ending = useRef(new AbortController());
  useEffect(() => {
    ending.current = new AbortController();
    void load(null, ending.current.signal);
    return () => ending.current.abort();
  }, [key, again]);
  const items = page?.key === key ? page.items : [];
  // The first samples of a run are waited for; later the list stays as it is while somebody reads it.
  const isWaiting = page?.key === key && items.length === 0 && ["starting", "running"].includes(experiment.state);
  useEffect(() => {
    if (!isWaiting) return undefined;
    const timer = setInterval(() => void load(null, ending.current.signal), 3000);
    return () => clearInterval(timer);
  }, [isWaiting, key]);
  const chosen = query.get("sample");
  const selected = items.find((each) => each.id === chosen) ?? null;

  // j and k, or the arrows, step through the list.
  const stepping = useRef({ items, chosen, set });
  stepping.current = { items, chosen, set };
  useEffect(() => {
    const pressed = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement;
      if (event.altKey || event.ctrlKey || event.metaKey || ["INPUT", "SELECT", "TEXTAREA"].includes(target.tagName)) return;
      const by = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key];
      const now = stepping.current;
      if (by === undefined || now.items.length === 0) return;
      event.preventDefault();
      const at = now.items.findIndex((each) => each.id === now.chosen);
      const next = now.items[Math.min(now.items.length - 1, Math.max(0, at < 0 ? 0 : at + by))]!;
      // The address changes later than the next key of a fast reader comes.
      now.chosen = next.id;
      now.set({ sample: next.id });
      document.getElementById(`row-${next.id}`)?.scrollIntoView({ block: "nearest" });
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);

  const field = (name: string, label: string) => (
    <label>
      {label}{" "}
      <input
        type="number"
        step="any"
        class="short"
        value={query.get(name) ?? ""}
        onChange={(event) => set({ [name]: event.currentTarget.value, sample: null })}
      />
    </label>
  );
  return (
    <section>
      <Head experiment={experiment} shared={shared} ids={[id]} />
      <div class="toolbar">
        <label>
          Kind{" "}
          <select value={filters.kind ?? ""} onChange={(event) => set({ kind: event.currentTarget.value, sample: null })}>
            <option value="">all</option>
            {KINDS.map((each) => (
              <option key={each}>{each}</option>
            ))}
          </select>
        </label>
        <label>
          Order{" "}
          <select value={filters.order ?? "newest"} onChange={(event) => set({ order: event.currentTarget.value, sample: null })}>
            <option>newest</option>
            <option>best</option>
            <option>worst</option>
          </select>
        </label>
        {field("step", "Step")}
        {field("row", "Problem")}
        {field("group", "Group")}
        {field("min", "Reward from")}
        {field("max", "to")}
        <label>
          <input type="checkbox" checked={filters.failed === "true"} onChange={(event) => set({ failed: event.currentTarget.checked ? "true" : null, sample: null })} /> failed
          only
        </label>
        <button onClick={() => setAgain(again + 1)}>Load the newest</button>
      </div>
      {error && <p class="notice bad">{error}</p>}
      {page?.key === key && items.length === 0 && !error && (
        <p class="quiet">No sample matches. {isWaiting ? "The page looks again every three seconds." : ""}</p>
      )}
      {items.length > 0 && (
        <div class={chosen ? "samples chosen" : "samples"}>
          <div class="list">
            <Scatter items={items} chosen={chosen} x={query.get("sx") ?? "tokens"} y={query.get("sy") ?? "reward"} onAxes={(x, y) => set({ sx: x, sy: y })} onChoose={(each) => set({ sample: each })} />
            <div class="table">
              <table>
                <caption class="quiet small">
                  {items.length} shown{page!.next ? ", there are more" : ""}
                  {page!.unread > 0 ? `; ${page!.unread} older files are still being read` : ""}. Keys j and k step through them.
                </caption>
                <thead>
                  <tr>
                    <th scope="col">Step</th>
                    <th scope="col">Kind</th>
                    <th scope="col">Problem</th>
                    <th scope="col">Reward</th>
                    <th scope="col">Tokens</th>
                    <th scope="col">Lag</th>
                    <th scope="col">End</th>
                    <th scope="col">Completion</th>
                  </tr>
                </thead>
                <tbody>
                  {items.map((each) => (
                    <tr key={each.id} id={`row-${each.id}`} aria-selected={each.id === chosen} onClick={() => set({ sample: each.id })}>
                      <td>{each.step ?? "–"}</td>
                      <td>{each.kind}</td>
                      <td>{each.row}</td>
                      <td>{number(each.reward)}</td>
                      <td>{each.num_sampled}</td>
                      <td>{each.lag ?? "–"}</td>
                      <td>{each.finish_reason}</td>
                      <td class="words">
                        <button class="plain" onClick={() => set({ sample: each.id })}>
                          {each.completion.slice(0, 120) || "(no text)"}
                        </button>
                      </td>
                    </tr>
                  ))}
                </tbody>
              </table>
            </div>
            {page!.next && <button onClick={() => void load(page!.next, ending.current.signal)}>More</button>}
          </div>
          <div class="detail">
            {selected || chosen ? (
              <Trajectory key={chosen} experimentId={id} sampleId={chosen!} sample={selected} colouring={query.get("colour") ?? "none"} onSet={set} />
            ) : (
              <p class="quiet">Choose a sample in the list or in the scatter.</p>
            )}
          </div>
        </div>
      )}
      {items.length === 0 && chosen && <Trajectory key={chosen} experimentId={id} sampleId={chosen} sample={null} colouring={query.get("colour") ?? "none"} onSet={set} />}
    </section>
  );
}

export type SetQuery = (changes: Record<string, string | null>) => void;

/** Members of one group are adjacent in one file: `FILE/PLACE/MEMBER`. */
export const groupOf = (sampleId: string): string => sampleId.split("/").slice(0, 2).join("/");

export function useGroup(experimentId: string, sampleId: string, sample: Sample | null): { members: Sample[] | null; error: string } {
  const [members, setMembers] = useState<Sample[] | null>(null);
  const [error, setError] = useState("");
  const place = groupOf(sampleId);
  const query = useMemo(() => {
    if (sample) return { group: sample.group_id, kind: sample.kind };
    // From a link alone: the file's name has the step or the version.
    const step = /^step-0*(\d+)/.exec(sampleId);
    const version = /^evaluation-v0*(\d+)/.exec(sampleId);
    return step ? { step: step[1], kind: "trained" } : version ? { kind: "evaluation" } : { kind: "filtered,dropped,failed" };
  }, [sampleId, sample?.group_id]);
  useEffect(() => {
    const ending = new AbortController();
    const ask = async () => {
      let after: string | null | undefined;
      // A link's file may be far back: so many pages are looked through.
      for (let pages = 0; pages < 10; pages += 1) {
        const page: SamplePage = await call(`${experimentPath(experimentId)}/samples`, { query: { ...query, after, limit: 200, tokens: sample !== null }, signal: ending.signal });
        const found = page.items.filter((each) => groupOf(each.id) === place);
        if (found.length > 0) {
          if (sample !== null) return found;
          const whole: SamplePage = await call(`${experimentPath(experimentId)}/samples`, {
            query: { group: found[0]!.group_id, kind: found[0]!.kind, limit: 200, tokens: true },
            signal: ending.signal,
          });
          return whole.items.filter((each) => groupOf(each.id) === place);
        }
        after = page.next;
        if (!after) break;
      }
      throw new Error("this sample is not kept any more");
    };
    ask().then(
      (found) => setMembers(found.sort((one, other) => one.member - other.member)),
      (reason: unknown) => ending.signal.aborted || setError(reason instanceof Error ? reason.message : String(reason)),
    );
    return () => ending.abort();
  }, [experimentId, place]);
  return { members, error };
}
