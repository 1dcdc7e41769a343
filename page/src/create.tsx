// A spec as text, made into an experiment; what the gateway refuses stands beside the line that it is about.
import { useRef, useState } from "preact/hooks";
import { call, experimentPath, Refused, type Experiment } from "./api";
import type { Shared } from "./main";
import { EXAMPLE, placed, syntaxErrors, toYaml, type LineError } from "./specs";

export function Create({ shared }: { shared: Shared }) {
  const [text, setText] = useState("");
  const [errors, setErrors] = useState<LineError[]>([]);
  const [isBusy, setBusy] = useState(false);
  const area = useRef<HTMLTextAreaElement>(null);
  const gutter = useRef<HTMLDivElement>(null);
  const change = (value: string) => {
    setText(value);
    setErrors([]);
  };
  const fill = async (from: string) => {
    if (from === "example") change(EXAMPLE);
    else if (from !== "") {
      try {
        change(toYaml((await call<Experiment>(experimentPath(from))).spec));
      } catch (reason) {
        setErrors([{ line: null, path: "", text: String(reason) }]);
      }
    }
  };
  const create = async (start: boolean) => {
    const wrong = syntaxErrors(text);
    setErrors(wrong);
    if (wrong.length > 0) return;
    setBusy(true);
    try {
      const made = await call<Experiment>("/v1/experiments", { method: "POST", text, query: { start } });
      shared.refresh();
      location.hash = start ? `#/run/${encodeURIComponent(made.id)}` : "#/";
    } catch (reason) {
      setErrors(reason instanceof Refused ? placed(text, reason.errors, reason.message) : [{ line: null, path: "", text: String(reason) }]);
    }
    setBusy(false);
  };
  const go = (line: number) => {
    const lines = text.split("\n");
    const start = lines.slice(0, line - 1).reduce((sum, each) => sum + each.length + 1, 0);
    area.current?.focus();
    area.current?.setSelectionRange(start, start + (lines[line - 1]?.length ?? 0));
    area.current?.scrollTo({ top: Math.max(0, (line - 8) * 20) });
  };
  const count = Math.max(text.split("\n").length, 24);
  const wrong = new Set(errors.map((each) => each.line));
  return (
    <section class="create">
      <h1>New experiment</h1>
      <div class="buttons">
        <label class="inline" for="begin-with">
          Begin with
        </label>
        <select id="begin-with" onChange={(event) => void fill(event.currentTarget.value)}>
          <option value="">nothing</option>
          <option value="example">an example</option>
          {shared.experiments.map((each) => (
            <option key={each.id} value={each.id}>
              the spec of {each.name} ({each.id})
            </option>
          ))}
        </select>
        <label class="button">
          Upload a file
          <input
            class="hidden-input"
            type="file"
            accept=".yaml,.yml,.json"
            onChange={(event) => void event.currentTarget.files?.[0]?.text().then(change)}
          />
        </label>
      </div>
      <div class="editor">
        <div class="gutter" ref={gutter} aria-hidden="true">
          {Array.from({ length: count }, (_, at) => (
            <div key={at} class={wrong.has(at + 1) ? "bad" : undefined}>
              {at + 1}
            </div>
          ))}
        </div>
        <textarea
          ref={area}
          aria-label="The spec, in YAML or JSON"
          spellcheck={false}
          wrap="off"
          rows={24}
          placeholder="Paste a spec here, in YAML or JSON"
          value={text}
          onInput={(event) => change(event.currentTarget.value)}
          onScroll={(event) => {
            if (gutter.current) gutter.current.scrollTop = event.currentTarget.scrollTop;
          }}
        />
      </div>
      {errors.length > 0 && (
        <div role="alert">
          <ul class="errors">
            {errors.map((error, at) => (
              <li key={at}>
                {error.line !== null && (
                  <button class="plain" onClick={() => go(error.line!)}>
                    line {error.line}
                  </button>
                )}{" "}
                {error.path && <code>{error.path}</code>} {error.text}
              </li>
            ))}
          </ul>
        </div>
      )}
      <div class="buttons">
        <button class="primary" disabled={isBusy || text.trim() === ""} onClick={() => void create(true)}>
          Create and start
        </button>
        <button disabled={isBusy || text.trim() === ""} onClick={() => void create(false)}>
          Create a draft
        </button>
      </div>
    </section>
  );
}
