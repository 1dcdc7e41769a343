// Specs as text: where in it an error of the gateway stands.
import { LineCounter, isCollection, isMap, isPair, isScalar, parseDocument, stringify, type Node } from "yaml";
import type { FieldError } from "./api";

export interface LineError {
  line: number | null;
  path: string;
  text: string;
}

/** The line of a path such as `reward.components.0.kind`: of its key, else of the section where it is wanted. */
export function lineOf(text: string, path: string): number | null {
  const lines = new LineCounter();
  const document = parseDocument(text, { lineCounter: lines });
  let node: unknown = document.contents;
  let start: number | null = null;
  for (const part of path.split(".").filter((each) => each !== "")) {
    let next: unknown;
    if (isMap(node)) {
      const pair = node.items.find((item) => isScalar(item.key) && String(item.key.value) === part);
      if (pair === undefined) break;
      start = (pair.key as Node).range?.[0] ?? start;
      next = pair.value;
    } else if (isCollection(node) && /^\d+$/.test(part)) {
      const item = node.items[Number(part)];
      if (item === undefined || isPair(item)) break;
      start = (item as Node).range?.[0] ?? start;
      next = item;
    } else break;
    node = next;
  }
  return start === null ? null : lines.linePos(start).line;
}

/** What the text is not even YAML for, before it is sent. */
export function syntaxErrors(text: string): LineError[] {
  return parseDocument(text, { prettyErrors: true }).errors.map((error) => ({
    line: error.linePos?.[0].line ?? null,
    path: "",
    text: error.message.split("\n")[0]!.replace(/ at line \d+, column \d+:?$/, ""),
  }));
}

export function placed(text: string, errors: readonly FieldError[], detail: string): LineError[] {
  if (errors.length === 0) {
    const named = /\bat line (\d+)/.exec(detail);
    return [{ line: named ? Number(named[1]) : pathIn(text, detail), path: "", text: detail }];
  }
  const found = errors.map((error) => ({ line: lineOf(text, error.path), path: error.path, text: error.allowed }));
  return found.sort((one, other) => (one.line ?? 0) - (other.line ?? 0));
}

/** Refusals of what a spec names (a file, a model) begin with the key, or have it in them. */
function pathIn(text: string, detail: string): number | null {
  for (const match of detail.matchAll(/\b[a-z_]+(?:\.[a-z_0-9]+)+\b/g)) {
    const line = lineOf(text, match[0]);
    if (line !== null) return line;
  }
  return null;
}

export const toYaml = (spec: unknown) => stringify(spec, { lineWidth: 110 });

export const EXAMPLE = `# An experiment: a model, rows with prompts and labels, a grader, and how long to train. All paths are absolute, on the fleet's
# machine. Every key is described in docs/configuration.md.
name: my-first
seed: 0

model:
  path: /path/to/a/hugging-face/model

data:
  path: /path/to/train.jsonl
  prompt_column: prompt
  label_column: answer

rollout:
  group_size: 8
  sampling:
    max_new_tokens: 512

# 1 where the number after the last "####" is the label, else 0.
reward:
  components:
    - kind: numeric
  filter_zero_spread: true

algorithm:
  advantage: {kind: grpo}

optimisation:
  steps: 100
  groups_per_mini_batch: 16
  learning_rate: 1.0e-6

evaluation:
  path: /path/to/held-out.jsonl
  every_versions: 5

checkpoint:
  every_steps: 20
`;
