import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { usePoll, type Experiment } from "./api";
import { Actions } from "./actions";
import { Chart, placesOf, type Axis, type Zoom } from "./chart";
import { ALL_NAMES, linesOf, SECTIONS } from "./charts";
import { isJob } from "./job";
import type { Route, Shared } from "./main";
import { forksOf, Happenings, marksOf } from "./marks";
import { Notices } from "./notices";
import { SeriesOf } from "./series";

/** Of a series, twice as many as a chart has room for; a saved table has all. */
const POINTS = 800;
const AXES: Axis[] = ["step", "version", "time", "tokens"];

/** Ask for the charts of runs before it is known that they are there. */
export function askEarlyForRuns(ids: string[]): void {
  for (const id of ids) new SeriesOf(id, ALL_NAMES, POINTS).askEarly();
}

export function useTheme(): number {
  const [count, setCount] = useState(0);
  useEffect(() => {
    const changed = () => setCount((each) => each + 1);
    const media = matchMedia("(prefers-color-scheme: dark)");
    addEventListener("themechange", changed);
    media.addEventListener("change", changed);
    return () => {
      removeEventListener("themechange", changed);
      media.removeEventListener("change", changed);
    };
  }, []);
  return count;
}

export function Run({ ids, route, shared }: { ids: string[]; route: Route; shared: Shared }) {
  const kept = useRef(new Map<string, SeriesOf>());
  const experiments = ids.map((id) => shared.experiments.find((each) => each.id === id)!);
  const isOver = experiments.every((each) => ["completed", "stopped", "failed", "draft"].includes(each.state));
  const { data, error } = usePoll(
    async (signal) => {
      for (const id of ids) {
        const series = kept.current.get(id) ?? new SeriesOf(id, ALL_NAMES, POINTS);
        kept.current.set(id, series);
        await series.update(signal);
      }
      return { at: Date.now() };
    },
    isOver ? 30 : 3,
    ids.join(),
  );
  const happened = useRef(new Map<string, Happenings>());
  const hasMarks = route.query.get("marks") !== "0";
  const { data: marked } = usePoll(
    async (signal) => {
      for (const id of hasMarks ? ids : []) {
        const each = happened.current.get(id) ?? new Happenings(id);
        happened.current.set(id, each);
        await each.update(signal);
      }
      return { count: [...happened.current.values()].reduce((sum, each) => sum + each.items.length, 0) };
    },
    isOver ? 60 : 10,
    `${ids.join()} ${hasMarks}`,
  );
  const [zoom, setZoom] = useState<Zoom>(null);
  const theme = useTheme();
  const axis = AXES.find((each) => each === route.query.get("x")) ?? "step";
  const strength = Math.min(0.99, Math.max(0, Number(route.query.get("smooth") ?? 0) || 0));
  const isMean = route.query.get("mean") === "1";
  const set = (name: string, value: string | null) => {
    const query = new URLSearchParams(route.query);
    if (value === null) query.delete(name);
    else query.set(name, value);
    location.replace(`#/run/${ids.map(encodeURIComponent).join(",")}${query.size > 0 ? `?${query}` : ""}`);
  };
  const labels = experiments.map((each) => (experiments.filter((other) => other.name === each.name).length > 1 ? each.id : each.name));
  const sections = useMemo(
    () =>
      SECTIONS.map((section) => ({
        title: section.title,
        charts: section.charts
          .map((chart) => ({
            chart,
            runs: ids.flatMap((id, at) => {
              const series = kept.current.get(id);
              const lines = series ? linesOf(chart, series).filter((line) => line.column.steps.length > 0) : [];
              return lines.length > 0 ? [{ id, label: labels[at]!, series: series!, lines }] : [];
            }),
          }))
          .filter(({ runs }) => runs.length > 0),
      })).filter((section) => section.charts.length > 0),
    [data, ids.join()],
  );
  const { marks, publications } = useMemo(() => {
    const found = { marks: [] as ReturnType<typeof marksOf>, publications: [] as number[] };
    if (!hasMarks) return found;
    ids.forEach((id, at) => {
      const series = kept.current.get(id);
      if (!series || series.columns.size === 0) return;
      const places = placesOf(series, axis);
      const own = [...(happened.current.get(id)?.items ?? []), ...forksOf(experiments[at]!, shared.experiments)];
      const labelled = ids.length > 1 ? own.map((each) => ({ ...each, label: `${labels[at]}: ${each.label}` })) : own;
      found.marks.push(...marksOf(labelled, series, axis, places.at, places.start));
      if (ids.length === 1) found.publications = places.publications;
    });
    return found;
  }, [data, marked?.count, hasMarks, axis, ids.join(), shared.experiments.length]);
  return (
    <section>
      {experiments.map((each) => (
        <Head key={each.id} experiment={each} shared={shared} ids={ids} />
      ))}
      <div class="toolbar">
        <label>
          Along{" "}
          <select
            value={axis}
            onChange={(event) => {
              setZoom(null);
              set("x", event.currentTarget.value);
            }}
          >
            {AXES.map((each) => (
              <option key={each}>{each}</option>
            ))}
          </select>
        </label>
        <label>
          Smoothing{" "}
          <input type="range" min="0" max="0.98" step="0.02" value={strength} onInput={(event) => set("smooth", Number(event.currentTarget.value) > 0 ? event.currentTarget.value : null)} />
        </label>
        <AddRun ids={ids} shared={shared} />
        {ids.length > 1 && (
          <label>
            <input type="checkbox" checked={isMean} onChange={(event) => set("mean", event.currentTarget.checked ? "1" : null)} /> mean and spread
          </label>
        )}
        <label title="red: trouble; dotted: changes of state, services that left; blue: forks; ticks at the axis: publications">
          <input type="checkbox" checked={hasMarks} onChange={(event) => set("marks", event.currentTarget.checked ? null : "0")} /> marks
          {hasMarks && marks.length > 0 ? ` (${marks.length})` : ""}
        </label>
        {zoom ? (
          <button onClick={() => setZoom(null)}>Show all</button>
        ) : (
          <span class="quiet small">Drag over a chart to zoom all of them; double-click shows all.</span>
        )}
      </div>
      {error && <p class="notice bad">{error.message}</p>}
      {data === null && !error && <p class="quiet">Loading…</p>}
      {data !== null && sections.length === 0 && <p class="quiet">Nothing was measured yet. The first figures come with the first step, or the first evaluation.</p>}
      {sections.map((section) => (
        <section key={section.title}>
          <h2 class="section">{section.title}</h2>
          <div class="charts">
            {section.charts.map(({ chart, runs }) => (
              <Chart key={chart.id} chart={chart} runs={runs} axis={axis} strength={strength} isMean={isMean} zoom={zoom} onZoom={setZoom} theme={theme} marks={marks} publications={publications} />
            ))}
          </div>
        </section>
      ))}
    </section>
  );
}

export function Head({ experiment, shared, ids }: { experiment: Experiment; shared: Shared; ids: string[] }) {
  const others = ids.filter((id) => id !== experiment.id);
  return (
    <>
      <div class="heading">
        <h1>
          {experiment.name} <span class={`state ${experiment.state}`}>{experiment.state}</span>
          <span class="quiet small">
            step {experiment.step} of {experiment.total_steps}, version {experiment.policy_version}
            {experiment.groups_from && (
              <>
                , trains the groups of <a href={`#/run/${encodeURIComponent(experiment.groups_from)}`}>{experiment.groups_from}</a>
              </>
            )}
          </span>
          {others.length > 0 && (
            <a class="small" href={`#/run/${others.map(encodeURIComponent).join(",")}`} aria-label={`leave out ${experiment.name}`}>
              leave out
            </a>
          )}
        </h1>
        {others.length === 0 && <Actions experiment={experiment} shared={shared} />}
      </div>
      <Notices experiment={experiment} />
    </>
  );
}

function AddRun({ ids, shared }: { ids: string[]; shared: Shared }) {
  const others = shared.experiments.filter((each) => !ids.includes(each.id) && !isJob(each));
  if (others.length === 0) return null;
  return (
    <label>
      Over{" "}
      <select
        value=""
        onChange={(event) => {
          location.hash = `#/run/${[...ids, event.currentTarget.value].map(encodeURIComponent).join(",")}`;
        }}
      >
        <option value="">another run…</option>
        {others.toReversed().map((each) => (
          <option key={each.id} value={each.id}>
            {each.name} ({each.id})
          </option>
        ))}
      </select>
    </label>
  );
}
