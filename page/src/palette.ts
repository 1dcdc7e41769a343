// Colours of the style sheet, for canvases.
export const NUM_LINES = 8;

export interface Ink {
  lines: string[];
  text: string;
  grid: string;
  ground: string;
  marks: Record<"trouble" | "change" | "fork", string>;
}

/** As hexadecimal, so that an opacity can be appended. */
function hex(colour: string): string {
  const parts = (colour.match(/[\d.]+/g) ?? []).slice(0, 3).map(Number);
  return `#${parts.map((part) => Math.round(part).toString(16).padStart(2, "0")).join("")}`;
}

export function colours(): Ink {
  const probe = document.createElement("span");
  document.body.append(probe);
  const read = (name: string) => {
    probe.style.color = `var(${name})`;
    return hex(getComputedStyle(probe).color);
  };
  const ink = {
    lines: Array.from({ length: NUM_LINES }, (_, number) => read(`--ink-${number}`)),
    text: read("--quiet"),
    grid: read("--line"),
    ground: read("--panel"),
    marks: { trouble: read("--bad"), change: read("--quiet"), fork: read("--accent") },
  };
  probe.remove();
  return ink;
}
