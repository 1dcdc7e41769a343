// What happened to a run, as marks on its charts: trouble, changes by people, forks; and where its versions were published.
import { call, experimentPath, type Event, type EventPage, type Experiment } from "./api";
import { clock } from "./format";
import type { SeriesOf } from "./series";

export type MarkKind = "trouble" | "change" | "fork";

export interface Happening {
  kind: MarkKind;
  label: string;
  /** Seconds since the epoch, or the step after which it happened. */
  seconds?: number;
  step?: number;
}

/** A mark at its place on the horizontal axis. */
export interface Mark {
  kind: MarkKind;
  label: string;
  x: number;
}

const TROUBLE = [
  "service_failed",
  "stalled",
  "rolled_back",
  "publication_aborted",
  "health_finding",
  "evaluation_failed",
  "training_job_ended",
  "tracker_failed",
  "upload_failed",
];
const CHANGES = ["experiment_state", "experiment_extended", "resources_changed", "settings_changed", "settings_held", "service_draining", "service_left"];
const PAGE = 1000;
/** More than this many of one kind would hide the lines. */
const MOST = 200;

/** Events of one experiment that are worth a mark, continued from a cursor. */
export class Happenings {
  readonly items: Happening[] = [];
  private cursor: string | null = null;

  constructor(private readonly experimentId: string) {}

  async update(signal: AbortSignal): Promise<void> {
    for (;;) {
      const page = await call<EventPage>(`${experimentPath(this.experimentId)}/log`, {
        query: { after: this.cursor, limit: PAGE, types: [...TROUBLE, ...CHANGES].join(",") },
        signal,
      });
      this.items.push(...page.items.map(happeningOf));
      this.cursor = page.next ?? this.cursor;
      if (page.items.length < PAGE) return;
    }
  }
}

function happeningOf(event: Event): Happening {
  const data = event.data as Record<string, unknown>;
  const says = ["state", "service_id", "cause", "finding", "component", "reason", "version"].map((name) => data[name]).filter((each) => typeof each === "string" || typeof each === "number");
  const label = `${clock(event.at)} ${event.type.replaceAll("_", " ")}${says.length > 0 ? `: ${says.slice(0, 2).join(", ")}` : ""}`;
  return { kind: TROUBLE.includes(event.type) ? "trouble" : "change", label, seconds: Date.parse(event.at) / 1000 };
}

/** Where others began at a checkpoint of this one, and where this one began at one of another. */
export function forksOf(experiment: Experiment, experiments: Experiment[]): Happening[] {
  const forks: Happening[] = experiments
    .filter((each) => each.origin?.experiment_id === experiment.id)
    .map((each) => ({ kind: "fork" as const, label: `${each.name} (${each.id}) begins here`, step: each.origin!.step }));
  if (experiment.origin) forks.push({ kind: "fork", label: `begins at ${experiment.origin.experiment_id}, step ${experiment.origin.step}`, step: experiment.origin.step });
  return forks;
}

/** The last place whose value is not above; -1 where there is none. */
function lastNotAbove(values: (number | null)[], wanted: number): number {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((values[middle] ?? -Infinity) <= wanted) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** Place what happened along an axis, whose places by step are given. */
export function marksOf(happenings: Happening[], series: SeriesOf, axis: string, at: (step: number) => number | null, start: number): Mark[] {
  const columns = [...series.columns.values()];
  const longest = columns.reduce((best, each) => (each.steps.length > best.steps.length ? each : best), columns[0] ?? { steps: [], versions: [], values: [], seconds: [] });
  const counts = new Map<MarkKind, number>();
  const found: Mark[] = [];
  for (const each of happenings.toReversed()) {
    const step = each.step ?? longest.steps[lastNotAbove(longest.seconds, each.seconds!)];
    const x = axis === "time" && each.seconds !== undefined ? each.seconds - start : step === undefined ? null : at(step);
    const count = counts.get(each.kind) ?? 0;
    if (x === null || x < 0 || count >= MOST) continue;
    counts.set(each.kind, count + 1);
    found.push({ kind: each.kind, label: each.label, x });
  }
  return found;
}
