import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { linesOf, type ChartDefinition, type Line } from "./charts";
import { save } from "./api";
import { duration, number, ticks } from "./format";
import type { Mark } from "./marks";
import { colours, type Ink } from "./palette";
import { placeOf, SeriesOf } from "./series";

export type Axis = "step" | "version" | "time" | "tokens";
export type Zoom = [number, number] | null;

export interface RunLines {
  id: string;
  label: string;
  series: SeriesOf;
  lines: Line[];
}

interface Drawn {
  key: string;
  label: string;
  colour: number;
  dash: number[];
  xs: number[];
  ys: (number | null)[];
  isSparse: boolean;
  /** Lowest and highest of several runs. */
  band?: [(number | null)[], (number | null)[]];
}

const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3], [1, 5]];
const HEIGHT = 220;
/** Of fewer values each is seen by itself, such as those of evaluations: a mean over them would only lag behind. */
export const SPARSE = 30;
/** Publications closer together than so many pixels are not drawn. */
const TICK_ROOM = 4;
const NEAR = 6;

/** Values of the horizontal axis, ascending; of several values in one place the last stays. */
function along(run: RunLines, line: Line, axis: Axis): { xs: number[]; ys: number[] } {
  const { column } = line;
  const raw =
    axis === "step"
      ? column.steps
      : axis === "version"
        ? column.versions
        : axis === "time"
          ? sinceStart(column.seconds, run)
          : tokensAt(column.steps, run);
  const xs: number[] = [];
  const ys: number[] = [];
  raw.forEach((x, at) => {
    if (x === null || (xs.length > 0 && x < xs.at(-1)!)) return;
    if (xs.at(-1) === x) ys[ys.length - 1] = column.values[at]!;
    else {
      xs.push(x);
      ys.push(column.values[at]!);
    }
  });
  return { xs, ys };
}

function sinceStart(seconds: (number | null)[], run: RunLines): (number | null)[] {
  const start = Math.min(...[...run.series.columns.values()].map((column) => column.seconds[0] ?? Infinity));
  return seconds.map((each) => (each === null ? null : each - start));
}

function tokensAt(steps: number[], run: RunLines): (number | null)[] {
  const trained = run.series.get("tokens/trained");
  let at = 0;
  return steps.map((step) => {
    if (trained === undefined) return null;
    while (at + 1 < trained.steps.length && trained.steps[at + 1]! <= step) at += 1;
    return trained.steps[at]! <= step ? trained.values[at]! : 0;
  });
}

/** Where a run's steps and publications lie along an axis. */
export function placesOf(series: SeriesOf, axis: Axis): { at: (step: number) => number | null; start: number; publications: number[] } {
  const columns = [...series.columns.values()];
  const column = columns.reduce((best, each) => (each.steps.length > best.steps.length ? each : best));
  const run: RunLines = { id: "", label: "", series, lines: [] };
  const { xs } = along(run, { label: "", column: { ...column, values: column.steps } }, axis);
  const { xs: steps } = along(run, { label: "", column: { ...column, values: column.steps } }, "step");
  const start = Math.min(...columns.map((each) => each.seconds[0] ?? Infinity));
  const isAlike = xs.length === steps.length;
  const at = (step: number): number | null => {
    if (axis === "step") return step;
    if (!isAlike) {
      const place = placeOf(column.steps, step);
      return axis === "version" && column.steps[place] === step ? column.versions[place]! : null;
    }
    return xs[placeOf(steps, step)] ?? null;
  };
  const publications = column.steps.flatMap((step, place) => (place > 0 && column.versions[place]! > column.versions[place - 1]! ? [at(step)] : []));
  return { at, start, publications: publications.filter((each) => each !== null) };
}

/** Exponential moving average without the pull of its start. */
export function smoothed(values: (number | null)[], strength: number): (number | null)[] {
  if (values.length < SPARSE) return values;
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = strength * sum + (1 - strength) * value;
    weight = strength * weight + (1 - strength);
    return sum / weight;
  });
}

/** One line instead of several runs': their mean, between the lowest and the highest. */
function merged(drawn: Drawn[]): Drawn {
  const values = new Map<number, number[]>();
  for (const each of drawn) {
    each.xs.forEach((x, at) => {
      const y = each.ys[at];
      if (y !== null && y !== undefined) values.set(x, [...(values.get(x) ?? []), y]);
    });
  }
  const xs = [...values.keys()].sort((one, other) => one - other);
  const at = (pick: (found: number[]) => number) => xs.map((x) => pick(values.get(x)!));
  return {
    ...drawn[0]!,
    xs,
    ys: at((found) => found.reduce((sum, each) => sum + each, 0) / found.length),
    band: [at((found) => Math.min(...found)), at((found) => Math.max(...found))],
  };
}

function drawnOf(runs: RunLines[], axis: Axis, strength: number, isMean: boolean, keepsLines: boolean): Drawn[] {
  const labels = [...new Set(runs.flatMap((run) => run.lines.map((line) => line.label)))];
  const found = runs.flatMap((run, place) =>
    run.lines.map((line) => {
      const { xs, ys } = along(run, line, axis);
      const name = labels.indexOf(line.label);
      const isOne = runs.length === 1 || isMean;
      return {
        key: line.label,
        label: isMean ? `${line.label} (mean)` : runs.length === 1 ? line.label : labels.length === 1 ? run.label : `${run.label}: ${line.label}`,
        colour: isOne ? name : place,
        dash: isOne ? [] : DASHES[name % DASHES.length]!,
        xs,
        ys: keepsLines ? ys : smoothed(ys, strength),
        isSparse: ys.length < SPARSE,
      };
    }),
  );
  if (!isMean) return found;
  return labels.map((label) => merged(found.filter((each) => each.key === label)));
}

/** Each line upon those below it. */
function stacked(drawn: Drawn[]): Drawn[] {
  const sums = new Map<number, number>();
  return drawn.map((each) => ({
    ...each,
    ys: each.xs.map((x, at) => {
      const sum = (sums.get(x) ?? 0) + (each.ys[at] ?? 0);
      sums.set(x, sum);
      return sum;
    }),
  }));
}

/** From a little below the lowest to a little above the highest; a flat line has room around it, a stack stands on 0. */
const rangeOf =
  (isStack: boolean) =>
  (_: uPlot, low: number | null, high: number | null): [number, number] => {
    if (low === null || high === null) return [0, 1];
    const bottom = isStack ? 0 : low;
    const span = high - bottom || Math.abs(high) || 1;
    const room = span * 0.06;
    return [bottom >= 0 && bottom - room < 0 ? Math.min(0, bottom) - (isStack ? 0 : room / 2) : bottom - room, high + room];
  };

interface Plan {
  data: uPlot.AlignedData;
  series: uPlot.Series[];
  bands: uPlot.Band[];
  /** What the legend shows: place in the data, and what its value is counted from. */
  legend: { label: string; colour: number; place: number; below: number | null }[];
}

function planOf(drawn: Drawn[], raw: Drawn[] | null, isStack: boolean, isLog: boolean, ink: string[]): Plan {
  const tables: uPlot.AlignedData[] = [];
  const series: uPlot.Series[] = [{}];
  const bands: uPlot.Band[] = [];
  const legend: Plan["legend"] = [];
  const positive = (ys: (number | null)[]) => (isLog ? ys.map((y) => (y !== null && y > 0 ? y : null)) : ys);
  const add = (xs: number[], ys: (number | null)[], style: uPlot.Series): number => {
    tables.push([xs, positive(ys)] as uPlot.AlignedData);
    series.push({ spanGaps: true, points: { show: xs.length < 3, size: 6 }, ...style });
    return series.length - 1;
  };
  const colour = (number: number) => ink[number % ink.length]!;
  for (const each of raw ?? []) add(each.xs, each.ys, { stroke: `${colour(each.colour)}44`, width: 1, dash: each.dash });
  drawn.forEach((each, at) => {
    if (each.band) {
      const low = add(each.xs, each.band[0], { stroke: "transparent", points: { show: false } });
      const high = add(each.xs, each.band[1], { stroke: "transparent", points: { show: false } });
      bands.push({ series: [high, low], fill: `${colour(each.colour)}33` });
    }
    const place = add(each.xs, each.ys, {
      stroke: colour(each.colour),
      width: isStack ? 1 : 2,
      dash: each.dash,
      ...(isStack && at === 0 ? { fill: `${colour(each.colour)}66` } : {}),
    });
    const below = isStack && at > 0 ? place - 1 : null;
    if (below !== null) bands.push({ series: [place, below], fill: `${colour(each.colour)}66` });
    legend.push({ label: each.label, colour: each.colour, place, below });
  });
  return { data: tables.length > 0 ? uPlot.join(tables as uPlot.AlignedData[]) : [[]], series, bands, legend };
}

const ALL_POINTS = 100_000;

/** Save every value of a chart: what is drawn of a long run is thinned. */
async function saveCsv(chart: ChartDefinition, runs: RunLines[]): Promise<void> {
  const whole: RunLines[] = [];
  for (const run of runs) {
    const series = new SeriesOf(run.id, [...chart.names], ALL_POINTS);
    await series.update(new AbortController().signal);
    whole.push({ ...run, series, lines: linesOf(chart, series) });
  }
  save(`${chart.id}.csv`, new Blob([csvOf(whole)], { type: "text/csv" }));
}

function csvOf(runs: RunLines[]): string {
  const quoted = (text: string) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const rows = runs.flatMap((run) =>
    run.lines.flatMap(({ label, column }) =>
      column.steps.map((step, at) => {
        const seconds = column.seconds[at];
        const when = seconds === null || seconds === undefined ? "" : new Date(seconds * 1000).toISOString();
        return [quoted(run.id), quoted(label), step, column.versions[at], column.values[at], when].join(",");
      }),
    ),
  );
  return ["experiment,series,step,version,value,at", ...rows, ""].join("\n");
}

/** Lines where something happened, and short ticks at the axis where a version was published. */
function drawMarks(plot: uPlot, marks: Mark[], publications: number[], ink: Ink): void {
  const { ctx, bbox } = plot;
  const scale = devicePixelRatio;
  const inside = (x: number) => x >= bbox.left && x <= bbox.left + bbox.width;
  const bottom = bbox.top + bbox.height;
  ctx.save();
  ctx.lineWidth = scale;
  const ticks = publications.map((x) => plot.valToPos(x, "x", true)).filter(inside);
  if (ticks.length * TICK_ROOM * scale <= bbox.width) {
    ctx.strokeStyle = ink.text;
    ctx.beginPath();
    for (const x of ticks) {
      ctx.moveTo(x, bottom);
      ctx.lineTo(x, bottom - 6 * scale);
    }
    ctx.stroke();
  }
  for (const mark of marks) {
    const x = plot.valToPos(mark.x, "x", true);
    if (!inside(x)) continue;
    ctx.strokeStyle = ink.marks[mark.kind];
    ctx.setLineDash(mark.kind === "change" ? [2 * scale, 4 * scale] : [6 * scale, 3 * scale]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bottom);
    ctx.stroke();
  }
  ctx.restore();
}

export function Chart(props: {
  chart: ChartDefinition;
  runs: RunLines[];
  axis: Axis;
  strength: number;
  isMean: boolean;
  zoom: Zoom;
  onZoom: (zoom: Zoom) => void;
  theme: number;
  marks: Mark[];
  /** Where versions were published, ascending. */
  publications: number[];
}) {
  const { chart, runs, axis, zoom, onZoom } = props;
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const zooming = useRef(onZoom);
  zooming.current = onZoom;
  const shown = useRef({ marks: props.marks, publications: props.publications });
  shown.current = { marks: props.marks, publications: props.publications };
  const [near, setNear] = useState<string[]>([]);
  const [isLog, setLog] = useState(false);
  const [place, setPlace] = useState<number | null>(null);
  const isStack = Boolean(chart.isStacked) && runs.length === 1;
  const plan = useMemo(() => {
    const ink = colours();
    const drawn = drawnOf(runs, axis, props.strength, props.isMean && runs.length > 1, false);
    const raw = props.strength > 0 && !isStack && !props.isMean ? drawnOf(runs, axis, 0, false, true).filter((each) => !each.isSparse) : null;
    return planOf(isStack ? stacked(drawn) : drawn, raw, isStack, isLog, ink.lines);
  }, [runs, axis, props.strength, props.isMean, isLog, isStack, props.theme]);
  const shape = plan.series.map((each) => `${String(each.stroke)}${each.dash?.join()}`).join();

  useEffect(() => {
    const ink = colours();
    const axisStyle = { stroke: ink.text, grid: { stroke: ink.grid, width: 1 }, ticks: { stroke: ink.grid, width: 1 }, font: "11px system-ui, sans-serif" };
    const made = new uPlot(
      {
        width: box.current!.clientWidth,
        height: HEIGHT,
        legend: { show: false },
        cursor: { sync: { key: "run" }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
        scales: { x: { time: false }, y: { distr: isLog ? 3 : 1, ...(isLog ? {} : { range: rangeOf(isStack) }) } },
        axes: [
          { ...axisStyle, size: 30, values: (_, places) => (axis === "time" ? places.map(duration) : places.map((each) => number(each))) },
          { ...axisStyle, size: 54, values: (_, places) => ticks(places) },
        ],
        series: plan.series,
        bands: plan.bands,
        hooks: {
          draw: [(u) => drawMarks(u, shown.current.marks, shown.current.publications, ink)],
          setCursor: [
            (u) => {
              setPlace(u.cursor.idx ?? null);
              const left = u.cursor.left ?? -1;
              const found = left < 0 ? [] : shown.current.marks.filter((each) => Math.abs(u.valToPos(each.x, "x") - left) <= NEAR).map((each) => each.label);
              setNear((before) => (before.join() === found.join() ? before : found));
            },
          ],
          setSelect: [
            (u) => {
              if (u.select.width > 4) zooming.current([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
              u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
            },
          ],
        },
      },
      plan.data,
      box.current!,
    );
    plot.current = made;
    made.over.addEventListener("dblclick", () => zooming.current(null));
    if (zoom) made.setScale("x", { min: zoom[0], max: zoom[1] });
    const resized = new ResizeObserver(() => made.setSize({ width: box.current!.clientWidth, height: HEIGHT }));
    resized.observe(box.current!);
    return () => {
      resized.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shape, isLog, axis, props.theme]);

  useEffect(() => {
    plot.current?.setData(plan.data, zoom === null);
    if (zoom) plot.current?.setScale("x", { min: zoom[0], max: zoom[1] });
  }, [plan, zoom]);

  useEffect(() => plot.current?.redraw(false), [props.marks, props.publications]);

  const valueAt = (column: number): number | null => {
    const values = plan.data[column] as (number | null | undefined)[] | undefined;
    for (let at = place ?? (values?.length ?? 0) - 1; values !== undefined && at >= 0; at -= 1) {
      const value = values[at];
      if (value !== null && value !== undefined) return value;
    }
    return null;
  };
  const x = place === null ? undefined : (plan.data[0] as number[])[place];
  const call = `/v1/experiments/${runs[0]!.id}/series?names=${chart.names.join(",")}`;
  return (
    <article class="chart" id={chart.id} aria-labelledby={`${chart.id}-title`}>
      <header>
        <h3 id={`${chart.id}-title`}>
          {chart.title} {chart.unit !== chart.title.toLowerCase() && <span class="quiet small">{chart.unit}</span>}
        </h3>
        <div class="buttons tiny">
          {!isStack && (
            <button class="plain" aria-pressed={isLog} onClick={() => setLog(!isLog)} title="logarithmic axis">
              log
            </button>
          )}
          <button class="plain" onClick={() => savePng(chart, plot.current!, plan)} title="save as a picture">
            PNG
          </button>
          <button class="plain" onClick={() => void saveCsv(chart, runs).catch((reason: unknown) => setNear([`not saved: ${String(reason)}`]))} title="save all values">
            CSV
          </button>
        </div>
      </header>
      <p class="small">{chart.what}</p>
      <div class="plot" ref={box} role="img" aria-label={`${chart.title}: ${plan.legend.map((each) => `${each.label} ${number(valueAt(each.place))}`).join(", ")}`} />
      <ul class="legend small">
        {x !== undefined && <li class="quiet">{axis === "time" ? duration(x) : `${axis} ${number(x)}`}</li>}
        {plan.legend.map((each) => {
          const value = valueAt(each.place);
          const below = each.below === null ? 0 : (valueAt(each.below) ?? 0);
          return (
            <li key={each.place}>
              <i class={`ink ink-${each.colour % 8}`} />
              {each.label} <b>{number(value === null ? null : value - below)}</b>
            </li>
          );
        })}
      </ul>
      {near.length > 0 && (
        <ul class="near small">
          {near.slice(0, 4).map((each, at) => (
            <li key={at}>{each}</li>
          ))}
          {near.length > 4 && <li>and {near.length - 4} more</li>}
        </ul>
      )}
      <details class="small">
        <summary>When to worry, and the same over REST</summary>
        <p>{chart.worry}</p>
        <p>
          <code>GET {call}</code>
        </p>
      </details>
    </article>
  );
}

/** The plot with its title and legend, on a ground of its own. */
function savePng(chart: ChartDefinition, plot: uPlot, plan: Plan): void {
  const source = plot.ctx.canvas;
  const scale = devicePixelRatio;
  const ink = colours();
  const picture = document.createElement("canvas");
  const head = 34 * scale;
  const foot = (12 + 18 * plan.legend.length) * scale;
  picture.width = source.width + 16 * scale;
  picture.height = source.height + head + foot;
  const context = picture.getContext("2d")!;
  context.fillStyle = ink.ground;
  context.fillRect(0, 0, picture.width, picture.height);
  context.fillStyle = ink.text;
  context.font = `600 ${15 * scale}px system-ui, sans-serif`;
  context.fillText(`${chart.title} (${chart.unit})`, 12 * scale, 23 * scale);
  context.drawImage(source, 8 * scale, head);
  context.font = `${12 * scale}px system-ui, sans-serif`;
  plan.legend.forEach((each, at) => {
    const y = head + source.height + (14 + 18 * at) * scale;
    context.fillStyle = ink.lines[each.colour % ink.lines.length]!;
    context.fillRect(14 * scale, y - 4 * scale, 14 * scale, 3 * scale);
    context.fillStyle = ink.text;
    context.fillText(each.label, 36 * scale, y);
  });
  picture.toBlob((content) => content && save(`${chart.id}.png`, content));
}
