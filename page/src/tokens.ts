// What is known of each token of a trajectory, and the colour that shows it.
import type { Sample } from "./api";
import { number } from "./format";

export interface Token {
  text: string;
  id: number;
  isSampled: boolean;
  version: number | null;
  logProb: number | null;
  /** Trainer less engine, in nats. */
  logRatio: number | null;
  advantage: number | null;
  lag: number | null;
  isClipped: boolean;
  weight: number | null;
}

export const COLOURINGS = ["none", "version", "advantage", "log-prob", "log-ratio", "mask"] as const;
export type Colouring = (typeof COLOURINGS)[number];

type Columns = Record<string, (number | null)[] | null | undefined> & { texts?: string[] };

/** A run-length column, spread over the tokens. */
function spread(starts: (number | null)[] | null | undefined, values: (number | null)[] | null | undefined, count: number): (number | null)[] {
  const found: (number | null)[] = new Array<number | null>(count).fill(null);
  starts?.forEach((start, at) => found.fill(values?.[at] ?? null, start ?? 0, starts[at + 1] ?? count));
  return found;
}

export function tokensOf(sample: Sample): Token[] {
  const columns = sample.tokens as Columns | null | undefined;
  const ids = columns?.token_ids;
  if (!columns || !ids) return [];
  const versions = spread(columns.version_starts, columns.versions, ids.length);
  const lags = spread(columns.lag_starts, columns.lags, ids.length);
  return ids.map((id, at) => {
    const isSampled = columns.loss_mask?.[at] === 1;
    const logProb = isSampled ? (columns.log_probs?.[at] ?? null) : null;
    // Where the update needed no pass, what it began from is the trainer's word.
    const trained = columns.trained_log_probs?.[at] ?? columns.old_log_probs?.[at] ?? null;
    return {
      text: columns.texts?.[at] ?? "",
      id: id!,
      isSampled,
      version: isSampled ? versions[at]! : null,
      logProb,
      logRatio: isSampled && trained !== null && logProb !== null ? trained - logProb : null,
      advantage: columns.advantages?.[at] ?? null,
      lag: isSampled ? lags[at]! : null,
      isClipped: columns.clipped?.[at] === 1,
      weight: isSampled ? (columns.loss_weights?.[at] ?? null) : null,
    };
  });
}

/** What can be shown of a trajectory: of what was not trained there is no advantage. */
export function colouringsOf(tokens: Token[]): Colouring[] {
  const has = (value: (token: Token) => unknown) => tokens.some((token) => value(token) !== null);
  return COLOURINGS.filter(
    (each) =>
      each === "none" ||
      each === "mask" ||
      (each === "version" && has((token) => token.version)) ||
      (each === "advantage" && has((token) => token.advantage)) ||
      (each === "log-prob" && has((token) => token.logProb)) ||
      (each === "log-ratio" && has((token) => token.logRatio)),
  );
}

const mix = (name: string, share: number) => `color-mix(in srgb, var(${name}) ${Math.round(100 * Math.min(1, Math.max(0, share)))}%, transparent)`;

export interface Scale {
  colourOf: (token: Token) => string | null;
  legend: { colour: string; label: string }[];
}

export function scaleOf(colouring: Colouring, tokens: Token[]): Scale {
  const largest = (value: (token: Token) => number | null) => Math.max(1e-9, ...tokens.map((token) => Math.abs(value(token) ?? 0)));
  const twoSided = (value: (token: Token) => number | null): Scale => {
    const most = largest(value);
    return {
      colourOf: (token) => {
        const found = value(token);
        return found === null ? null : mix(found < 0 ? "--minus" : "--plus", (0.65 * Math.abs(found)) / most);
      },
      legend: [
        { colour: mix("--minus", 0.65), label: number(-most) },
        { colour: "transparent", label: "0" },
        { colour: mix("--plus", 0.65), label: `+${number(most)}` },
      ],
    };
  };
  if (colouring === "advantage") return twoSided((token) => token.advantage);
  if (colouring === "log-ratio") return twoSided((token) => token.logRatio);
  if (colouring === "log-prob") {
    const most = largest((token) => token.logProb);
    return {
      colourOf: (token) => (token.logProb === null ? null : mix("--minus", (0.7 * -token.logProb) / most)),
      legend: [
        { colour: "transparent", label: "0 (certain)" },
        { colour: mix("--minus", 0.35), label: number(-most / 2) },
        { colour: mix("--minus", 0.7), label: `${number(-most)} nats (surprising)` },
      ],
    };
  }
  if (colouring === "version") {
    const versions = [...new Set(tokens.map((token) => token.version).filter((each) => each !== null))].sort((one, other) => one - other);
    return {
      colourOf: (token) => (token.version === null ? null : mix(`--ink-${versions.indexOf(token.version) % 8}`, 0.4)),
      legend: versions.map((version, at) => ({ colour: mix(`--ink-${at % 8}`, 0.4), label: `version ${version}` })),
    };
  }
  if (colouring === "mask") {
    return {
      colourOf: (token) => (token.isSampled ? mix(token.isClipped || token.weight === 0 ? "--minus" : "--plus", 0.35) : null),
      legend: [
        { colour: mix("--plus", 0.35), label: "sampled by the policy" },
        { colour: mix("--minus", 0.35), label: "clipped or rejected" },
        { colour: "transparent", label: "prompt, tools, template" },
      ],
    };
  }
  return { colourOf: () => null, legend: [] };
}

export function titleOf(token: Token): string {
  const facts = [
    `${JSON.stringify(token.text)} (token ${token.id})`,
    token.isSampled ? `sampled by version ${token.version}` : "not sampled",
    token.lag !== null && `lag ${token.lag}`,
    token.logProb !== null && `log-prob ${number(token.logProb)}`,
    token.logRatio !== null && `log-ratio trainer to engine ${number(token.logRatio)}`,
    token.advantage !== null && `advantage ${number(token.advantage)}`,
    token.weight !== null && token.weight !== 1 && `loss weight ${number(token.weight)}`,
    token.isClipped && "clipped",
  ];
  return facts.filter(Boolean).join("\n");
}
