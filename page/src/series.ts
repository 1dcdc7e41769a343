// Series of one experiment, kept in columns and continued from a cursor: a poll brings what is new and nothing else.
import { askEarly, call, experimentPath, type SeriesPage } from "./api";

export interface Column {
  steps: number[];
  versions: number[];
  values: number[];
  seconds: (number | null)[];
}

const empty = (): Column => ({ steps: [], versions: [], values: [], seconds: [] });

/** The place of a step, or where it belongs. */
export function placeOf(steps: number[], step: number): number {
  let low = 0;
  let high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle]! < step) low = middle + 1;
    else high = middle;
  }
  return low;
}

export class SeriesOf {
  readonly columns = new Map<string, Column>();
  /** Steps at which the gateway left values out: what is computed of several series passes them over. */
  readonly thinned = new Set<number>();
  private cursor: string | null = null;

  constructor(
    readonly experimentId: string,
    private readonly names: readonly string[],
    private readonly points: number,
  ) {}

  /** Ask for what `update` will want. */
  askEarly(): void {
    askEarly(`${experimentPath(this.experimentId)}/series`, this.query());
  }

  private query() {
    return { names: this.names.join(","), after: this.cursor, points: this.points };
  }

  /** Ask for what was written since; true where anything came. */
  async update(signal: AbortSignal): Promise<boolean> {
    const page = await call<SeriesPage>(`${experimentPath(this.experimentId)}/series`, {
      query: this.query(),
      signal,
    });
    const common = page.common ? new Set(page.common) : null;
    for (const found of page.items) {
      this.add(found.name, found);
      if (common !== null && found.num_points > found.steps.length) {
        for (const step of found.steps) if (!common.has(step)) this.thinned.add(step);
      }
    }
    this.cursor = page.next ?? this.cursor;
    return page.items.length > 0;
  }

  private add(name: string, found: Column): void {
    const column = this.columns.get(name) ?? empty();
    this.columns.set(name, column);
    found.steps.forEach((step, at) => {
      const place = placeOf(column.steps, step);
      // A step that was trained again replaces its value.
      const replaced = column.steps[place] === step ? 1 : 0;
      column.steps.splice(place, replaced, step);
      column.versions.splice(place, replaced, found.versions[at]!);
      column.values.splice(place, replaced, found.values[at]!);
      column.seconds.splice(place, replaced, found.seconds[at] ?? null);
    });
  }

  get(name: string): Column | undefined {
    return this.columns.get(name);
  }

  last(name: string): number | null {
    return this.columns.get(name)?.values.at(-1) ?? null;
  }
}

/** Mean of the last values of a series. */
export function recent(column: Column | undefined, count: number): number | null {
  const values = column?.values.slice(-count) ?? [];
  return values.length === 0 ? null : values.reduce((sum, each) => sum + each, 0) / values.length;
}
