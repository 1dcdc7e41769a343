import type { Sample } from "./api";
import { number, ticks } from "./format";

const AXES: Record<string, (sample: Sample) => number | null | undefined> = {
  reward: (sample) => sample.reward,
  tokens: (sample) => sample.num_sampled,
  lag: (sample) => sample.lag,
  step: (sample) => sample.step,
  version: (sample) => sample.version,
  advantage: (sample) => sample.advantage,
};
const ENDS = ["stop", "length", "turns", "tokens", "aborted"];
const WIDTH = 560;
const HEIGHT = 210;
const LEFT = 52;
const BOTTOM = 24;

/** Where equal points would hide each other they are moved aside, the same way each time. */
function nudge(text: string): number {
  let hash = 0;
  for (const letter of text) hash = (hash * 31 + letter.charCodeAt(0)) | 0;
  return ((hash >>> 0) % 1000) / 1000 - 0.5;
}

function scale(values: number[], from: number, to: number): { place: (value: number) => number; marks: number[] } {
  const low = Math.min(...values);
  const high = Math.max(...values);
  const span = high - low || Math.max(1, Math.abs(high));
  const bottom = low - span * 0.06;
  const top = high + span * 0.06;
  const rough = (top - bottom) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough)!;
  const first = Math.ceil(bottom / step);
  const marks = Array.from({ length: Math.floor(top / step) - first + 1 }, (_, at) => (first + at) * step);
  return { place: (value) => from + ((value - bottom) / (top - bottom)) * (to - from), marks };
}

export function Scatter(props: { items: Sample[]; chosen: string | null; x: string; y: string; onAxes: (x: string, y: string) => void; onChoose: (id: string) => void }) {
  const x = AXES[props.x] ? props.x : "tokens";
  const y = AXES[props.y] ? props.y : "reward";
  const points = props.items.flatMap((sample) => {
    const at = AXES[x]!(sample);
    const value = AXES[y]!(sample);
    return typeof at === "number" && typeof value === "number" ? [{ sample, at, value }] : [];
  });
  const ends = [...new Set(props.items.map((each) => each.finish_reason))].sort((one, other) => ENDS.indexOf(one) - ENDS.indexOf(other));
  const choice = (label: string, value: string, onChange: (value: string) => void) => (
    <label>
      {label}{" "}
      <select value={value} onChange={(event) => onChange(event.currentTarget.value)}>
        {Object.keys(AXES).map((each) => (
          <option key={each}>{each}</option>
        ))}
      </select>
    </label>
  );
  const across = points.length > 0 ? scale(points.map((each) => each.at), LEFT, WIDTH - 8) : null;
  const upwards = points.length > 0 ? scale(points.map((each) => each.value), HEIGHT - BOTTOM, 8) : null;
  return (
    <figure class="scatter">
      <div class="buttons small">
        {choice("Up", y, (value) => props.onAxes(x, value))}
        {choice("Across", x, (value) => props.onAxes(value, y))}
        <ul class="legend">
          {ends.map((each, at) => (
            <li key={each}>
              <i class={`ink ink-${at % 8} round`} />
              {each}
            </li>
          ))}
        </ul>
      </div>
      {across && upwards ? (
        <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={`${y} of ${points.length} samples over ${x}`}>
          {upwards.marks.map((mark, at) => (
            <g key={mark}>
              <line class="grid" x1={LEFT} x2={WIDTH - 8} y1={upwards.place(mark)} y2={upwards.place(mark)} />
              <text class="end" x={LEFT - 6} y={upwards.place(mark) + 4}>
                {ticks(upwards.marks)[at]}
              </text>
            </g>
          ))}
          {across.marks.map((mark) => (
            <g key={mark}>
              <line class="grid" x1={across.place(mark)} x2={across.place(mark)} y1={8} y2={HEIGHT - BOTTOM} />
              <text class="middle" x={across.place(mark)} y={HEIGHT - 7}>
                {number(mark)}
              </text>
            </g>
          ))}
          {points.map(({ sample, at, value }) => (
            <circle
              key={sample.id}
              class={`point fill-${ends.indexOf(sample.finish_reason) % 8}${sample.id === props.chosen ? " chosen" : ""}`}
              cx={across.place(at) + 5 * nudge(sample.id)}
              cy={upwards.place(value) + 9 * nudge(`${sample.id}y`)}
              r={sample.id === props.chosen ? 6 : 3.5}
              onClick={() => props.onChoose(sample.id)}
            >
              <title>{`step ${sample.step ?? "–"}, problem ${sample.row}, reward ${number(sample.reward)}, ${sample.num_sampled} tokens`}</title>
            </circle>
          ))}
        </svg>
      ) : (
        <p class="quiet small">None of these samples has both figures.</p>
      )}
    </figure>
  );
}
