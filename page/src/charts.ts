// What a run is looked at by: which series, what they mean, and when to worry. Names and formulas: docs/metrics.md.
import type { Column, SeriesOf } from "./series";

export interface Line {
  label: string;
  column: Column;
}

export interface ChartDefinition {
  id: string;
  title: string;
  /** Of the vertical axis. */
  unit: string;
  /** Series that are asked for; `a/*` is all that begin so. */
  names: string[];
  what: string;
  worry: string;
  isStacked?: boolean;
  /** The lines, where they are not the named series as they are. */
  lines?: (series: SeriesOf) => Line[];
}

export interface Section {
  title: string;
  charts: ChartDefinition[];
}

const named = (series: SeriesOf, pattern: RegExp, label: (match: RegExpExecArray) => string): Line[] =>
  [...series.columns]
    .map(([name, column]) => ({ match: pattern.exec(name), column }))
    .filter((each) => each.match !== null)
    .map(({ match, column }) => ({ label: label(match!), column }))
    .sort((one, other) => one.label.localeCompare(other.label, "en", { numeric: true }));

/** Compute a series from others, at the steps that the first of them has, unless parts of a step were left out. */
function computed(thinned: ReadonlySet<number>, columns: (Column | undefined)[], compute: (values: number[]) => number): Column | null {
  const [first, ...rest] = columns;
  if (first === undefined) return null;
  const maps = rest.map((column) => new Map(column?.steps.map((step, at) => [step, column.values[at]!])));
  const found: Column = { steps: [], versions: [], values: [], seconds: [] };
  first.steps.forEach((step, at) => {
    if (thinned.has(step)) return;
    const value = compute([first.values[at]!, ...maps.map((each) => each.get(step) ?? 0)]);
    if (!Number.isFinite(value)) return;
    found.steps.push(step);
    found.versions.push(first.versions[at]!);
    found.values.push(value);
    found.seconds.push(first.seconds[at] ?? null);
  });
  return found;
}

const line = (label: string, column: Column | null | undefined): Line[] => (column ? [{ label, column }] : []);

function lagShares(series: SeriesOf): Line[] {
  const lags = named(series, /^lag\/tokens\/(\d+)$/, (match) => match[1]!);
  const totals = new Map<number, number>();
  for (const { column } of lags) column.steps.forEach((step, at) => totals.set(step, (totals.get(step) ?? 0) + column.values[at]!));
  // A lag that no token of a step has is left out of the series: it is 0 there.
  const base = series.get("lag/mean");
  return lags.flatMap(({ label, column }) => {
    const values = new Map(column.steps.map((step, at) => [step, column.values[at]!]));
    const share = base && computed(series.thinned, [{ ...base, values: base.steps.map((step) => (values.get(step) ?? 0) / (totals.get(step) ?? Number.NaN)) }], ([value]) => value!);
    return line(label === "0" ? "fresh" : `lag ${label}`, share);
  });
}

function timeByCause(series: SeriesOf): Line[] {
  const get = (name: string) => series.get(`time/${name}_seconds`);
  // What is stacked has all of its parts at each step.
  const part = (name: string) => computed(series.thinned, [get(name)], ([value]) => value!);
  return [
    ...line("computing", part("compute")),
    ...line("waiting for groups", computed(series.thinned, [get("wait"), get("pace")], ([wait, pace]) => Math.max(0, wait! - pace!))),
    ...line("pacing (lag limit)", part("pace")),
    ...line("publishing", part("publish")),
    ...line("checkpointing", part("checkpoint")),
  ];
}

export const SECTIONS: Section[] = [
  {
    title: "Does it learn?",
    charts: [
      {
        id: "reward",
        title: "Reward",
        unit: "reward",
        names: ["reward/mean"],
        what: "Mean reward of the trajectories that each step trained on.",
        worry: "It stays at the lowest or the highest value, so that no group teaches anything; or it falls at once and stays down.",
      },
      {
        id: "held-out",
        title: "Held-out evaluation",
        unit: "reward",
        names: ["evaluation/*"],
        what: "How the policy does on problems that it is not trained on: accuracy where rewards are 0 or 1, else the mean reward.",
        worry: "It falls or stands still while the training reward rises: the policy learns the rows, or how to please the grader.",
        lines: (series) => {
          const accuracy = named(series, /^evaluation\/(?:([^/]+)\/)?accuracy$/, (match) => (match[1] ? `${match[1]} accuracy` : "accuracy"));
          const best = named(series, /^evaluation\/(?:([^/]+)\/)?((?:pass|best|maj)@\d+)$/, (match) => (match[1] ? `${match[1]} ${match[2]}` : match[2]!)).filter(
            ({ label }) => !/(pass|maj)@1$/.test(label),
          );
          const rewards = named(series, /^evaluation\/(?:([^/]+)\/)?reward_mean$/, (match) => (match[1] ? `${match[1]} reward` : "reward"));
          return [...(accuracy.length > 0 ? accuracy : rewards), ...best];
        },
      },
      {
        id: "components",
        title: "Reward components",
        unit: "reward",
        names: ["reward/*"],
        what: "Mean of each component of the reward as it was graded, before weights and shaping.",
        worry: "One rises while the one that you care about falls: the policy trades them against each other.",
        lines: (series) => {
          const found = named(series, /^reward\/(.+)\/mean$/, (match) => match[1]!);
          // One component that is the reward is the first chart again.
          return found.length > 1 ? found : [];
        },
      },
      {
        id: "engine-gap",
        title: "Engine and trainer, by rollout",
        unit: "nats per token",
        names: ["engine_gap/*"],
        what: "Distance between the log-probabilities of each rollout's engine and the trainer's, on tokens of the version that was trained.",
        worry: "One line leaves the others: that rollout computes something else. All of them grow: engine and trainer drift apart.",
        lines: (series) => named(series, /^engine_gap\/(.+)$/, (match) => match[1]!),
      },
      {
        id: "signal",
        title: "Groups without signal",
        unit: "share",
        names: ["groups/flat_fraction"],
        what: "Share of trained groups whose answers all have the same reward: a group-relative advantage is 0 in them.",
        worry: "Above 0.8: most of the work teaches nothing. Filter them, make groups larger, or choose other problems.",
      },
      {
        id: "preference",
        title: "Preferences",
        unit: "share",
        names: ["preference/accuracy", "held_out/preference/accuracy"],
        what: "Share of pairs whose preferred answer has the larger reward under the policy.",
        worry: "Training rises to 1 while the held-out pairs stay: it learns the pairs by heart.",
      },
      {
        id: "loss",
        title: "Loss",
        unit: "loss",
        names: ["loss/total", "loss/policy", "loss/kl", "loss/value", "loss/supervised", "nll", "held_out/loss"],
        what: "The loss that is minimised and its parts. A policy loss need not fall: it is near 0 where updates are small.",
        worry: "It grows by orders of magnitude, or jumps between signs: lower the learning rate.",
      },
    ],
  },
  {
    title: "Is it stable?",
    charts: [
      {
        id: "entropy",
        title: "Entropy",
        unit: "nats",
        names: ["entropy"],
        what: "How undecided the policy is about the next token, on average.",
        worry: "Near 0 after few steps: it has stopped to explore. Rising without end: it forgets how to write.",
      },
      {
        id: "kl",
        title: "KL",
        unit: "nats",
        names: ["kl/mean", "ratio/approx_kl", "correction/kl", "distillation/kl"],
        what: "How far the policy has moved: from the reference (kl), within a step (ratio), from the sampler (correction).",
        worry: "Above 1 from the reference, or above 0.1 within a step, and growing.",
      },
      {
        id: "gradient",
        title: "Gradient norm",
        unit: "norm",
        names: ["grad_norm"],
        what: "Length of the gradient before it is clipped, mean over the updates of a step.",
        worry: "A hundred times its usual size, or more with each step.",
      },
      {
        id: "clips",
        title: "Clip fractions",
        unit: "share",
        names: ["ratio/clip_fraction", "ratio/clip_fraction_lower", "advantage/clip_fraction", "value/clip_fraction"],
        what: "Share of tokens whose ratio, advantage or value reached its bound, so that they pull no further.",
        worry: "Above 0.2: updates are larger than the clip allows. Exactly 0 at several updates a step: they do nothing.",
      },
      {
        id: "weights",
        title: "Importance weights",
        unit: "weight",
        names: ["correction/weight", "correction/effective_sample_size", "ratio/mean"],
        what: "How much likelier the trained policy makes its tokens than the policy that sampled them; and the share of the samples that this leaves effective.",
        worry: "The mean is far from 1, or less than half of the samples are effective: what is trained is too old, or engine and trainer disagree.",
      },
      {
        id: "rejected",
        title: "Rejected tokens",
        unit: "share",
        names: ["correction/above_fraction", "correction/below_fraction", "correction/rejected_fraction", "correction/rejected_sequence_fraction"],
        what: "Share of tokens or answers whose weight was out of bounds, and that were masked for it.",
        worry: "More than a few per cent: samples are paid for and thrown away.",
      },
      {
        id: "learning-rate",
        title: "Learning rate",
        unit: "rate",
        names: ["learning_rate"],
        what: "Of the last update of the step, as the schedule has it.",
        worry: "It is 0: the schedule has ended before the run.",
      },
    ],
  },
  {
    title: "Is it fresh?",
    charts: [
      {
        id: "lag",
        title: "Lag of trained tokens",
        unit: "share",
        names: ["lag/tokens/*", "lag/mean"],
        what: "By how many policy versions the trained tokens are older than the policy that learns from them.",
        worry: "Most of them are at the limit (asynchrony.max_lag): sampling runs too far ahead of training.",
        isStacked: true,
        lines: lagShares,
      },
      {
        id: "lengths",
        title: "Lengths",
        unit: "tokens",
        names: ["completion_tokens/mean", "completion_tokens/max", "prompt_tokens/mean"],
        what: "Sampled tokens of a trajectory, mean and longest, and tokens of its prompt.",
        worry: "The mean nears max_new_tokens: answers are cut off. It grows without the reward: add a length penalty.",
      },
      {
        id: "publication",
        title: "Publication of weights",
        unit: "seconds",
        names: ["publication/prepare_seconds", "publication/transfer_seconds", "publication/commit_seconds"],
        what: "How long each new version takes to reach every rollout: until all have joined, have the bytes, and serve it.",
        worry: "Longer than a step: rollouts sample with what is older than it needs to be.",
        isStacked: true,
      },
    ],
  },
  {
    title: "Is it fast?",
    charts: [
      {
        id: "speed",
        title: "Tokens a second",
        unit: "tokens/s",
        names: ["tokens/trained_in_step", "time/step_seconds"],
        what: "Sampled tokens that a step trained on, over the time of the step with all its waiting.",
        worry: "It falls during the run while lengths stay the same: the Flow view and the diagnosis name the bottleneck.",
        lines: (series) => line("trained", computed(series.thinned, [series.get("tokens/trained_in_step"), series.get("time/step_seconds")], ([tokens, seconds]) => tokens! / seconds!)),
      },
      {
        id: "time",
        title: "Time of a step by cause",
        unit: "seconds",
        names: ["time/compute_seconds", "time/wait_seconds", "time/pace_seconds", "time/publish_seconds", "time/checkpoint_seconds"],
        what: "What the trainer spends a step on: computing, waiting for groups, holding ready groups back for the lag limit, publishing, checkpointing.",
        worry: "Waiting is most of it: add rollouts or engine slots. Pacing is: raise max_lag, or level the lengths of answers.",
        isStacked: true,
        lines: timeByCause,
      },
      {
        id: "idle",
        title: "Idle shares",
        unit: "share",
        names: ["trainer/idle_ratio", "rollouter/idle_ratio"],
        what: "Share of the time that the trainer waited for groups, and that rollouts had none in hand.",
        worry: "One is high while the other is low: move hardware to the busy side. Both are high: look at the budget and at publications.",
      },
    ],
  },
];

export const ALL_CHARTS = SECTIONS.flatMap((section) => section.charts);

/** What the charts and the axis of tokens need. */
export const ALL_NAMES = [...new Set([...ALL_CHARTS.flatMap((chart) => chart.names), "tokens/trained"])];

const isSame = (one: Column, other: Column): boolean =>
  one.values.length === other.values.length && one.values.every((value, at) => value === other.values[at]);

export function linesOf(chart: ChartDefinition, series: SeriesOf): Line[] {
  const found = chart.lines ? chart.lines(series) : chart.names.flatMap((name) => line(name, series.get(name)));
  // A part that is the whole would only hide it.
  return chart.isStacked ? found : found.filter((each, at) => !found.slice(0, at).some((other) => isSame(each.column, other.column)));
}
