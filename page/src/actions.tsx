// What an operator may do with an experiment in its present state. Each button is one call that the audit records.
import { useEffect, useState } from "preact/hooks";
import { parse } from "yaml";
import { all, call, experimentPath, type Checkpoint, type Experiment } from "./api";
import { Dialog } from "./dialog";
import type { Shared } from "./main";

type Action = "start" | "pause" | "resume" | "stop" | "extend" | "change" | "fork" | "delete";

/** As services/gateway/lifecycle/states.py has them; the gateway refuses what has changed meanwhile. */
const ALLOWED: Record<Experiment["state"], Action[]> = {
  draft: ["start", "extend", "change", "delete"],
  starting: ["stop", "extend", "change"],
  running: ["pause", "stop", "extend", "change", "fork"],
  paused: ["resume", "stop", "extend", "change", "fork"],
  stopping: [],
  stopped: ["resume", "extend", "fork", "delete"],
  completed: ["extend", "fork", "delete"],
  failed: ["resume", "extend", "fork", "delete"],
};
const LABELS: Record<Action, string> = {
  start: "Start",
  pause: "Pause",
  resume: "Resume",
  stop: "Stop",
  extend: "Extend…",
  change: "Change…",
  fork: "Fork…",
  delete: "Delete",
};

export function Actions({ experiment, shared }: { experiment: Experiment; shared: Shared }) {
  const [open, setOpen] = useState<Action | null>(null);
  const [error, setError] = useState("");
  const [isBusy, setBusy] = useState(false);
  useEffect(() => setError(""), [experiment.state]);
  if (!shared.isOperator) return null;
  const path = experimentPath(experiment.id);
  const act = async (action: Action) => {
    setBusy(true);
    setError("");
    try {
      await call(`${path}/${action}`, { method: "POST" });
    } catch (reason) {
      setError(reason instanceof Error ? reason.message : String(reason));
    }
    setBusy(false);
    shared.refresh();
  };
  const close = () => setOpen(null);
  const asks = new Set<Action>(["stop", "extend", "change", "fork", "delete"]);
  return (
    <div class="actions">
      <div class="buttons" role="group" aria-label={`Actions on ${experiment.name}`}>
        {ALLOWED[experiment.state].map((action) => (
          <button key={action} disabled={isBusy} onClick={() => (asks.has(action) ? setOpen(action) : void act(action))}>
            {LABELS[action]}
          </button>
        ))}
      </div>
      {error && (
        <p class="bad" role="alert">
          {error}
        </p>
      )}
      {open === "stop" && (
        <Dialog
          title={`Stop ${experiment.name}?`}
          verb="Stop"
          isDangerous
          onClose={close}
          onDo={async () => {
            await call(`${path}/stop`, { method: "POST" });
            shared.refresh();
          }}
        >
          <p>Its trainer writes a checkpoint, its services fall idle, and what is under way is dropped. It can be resumed later.</p>
        </Dialog>
      )}
      {open === "delete" && (
        <Dialog
          title={`Delete ${experiment.name}?`}
          verb="Delete"
          isDangerous
          onClose={close}
          onDo={async () => {
            await call(path, { method: "DELETE" });
            shared.refresh();
          }}
        >
          <p>Its series and events are removed for good. Its directory with checkpoints and samples stays:</p>
          <p>
            <code>{experiment.directory}</code>
          </p>
        </Dialog>
      )}
      {open === "extend" && <Extend experiment={experiment} shared={shared} onClose={close} />}
      {open === "change" && <Change experiment={experiment} shared={shared} onClose={close} />}
      {open === "fork" && <Fork experiment={experiment} shared={shared} onClose={close} />}
    </div>
  );
}

function Extend({ experiment, shared, onClose }: { experiment: Experiment; shared: Shared; onClose: () => void }) {
  const [steps, setSteps] = useState(experiment.total_steps * 2);
  return (
    <Dialog
      title={`Extend ${experiment.name}`}
      verb="Extend"
      onClose={onClose}
      onDo={async () => {
        await call(`${experimentPath(experiment.id)}/extend`, { method: "POST", json: { steps } });
        shared.refresh();
      }}
    >
      <label for="extend-steps">Train until step</label>
      <input
        id="extend-steps"
        type="number"
        required
        min={experiment.total_steps + 1}
        value={steps}
        onInput={(event) => setSteps(event.currentTarget.valueAsNumber)}
      />
      <p class="quiet">It has {experiment.total_steps} steps now. One that has ended goes on from its newest checkpoint.</p>
    </Dialog>
  );
}

/** `a.b: 1` as `{a: {b: 1}}`; a mapping in YAML as it is. */
export function changesOf(text: string): Record<string, unknown> {
  const written: unknown = text.trim() === "" ? {} : parse(text);
  if (written === null || typeof written !== "object" || Array.isArray(written)) throw new Error("changes are lines of the form section.key: value");
  const found: Record<string, unknown> = {};
  for (const [path, value] of Object.entries(written)) {
    const parts = path.split(".");
    let place = found;
    for (const part of parts.slice(0, -1)) place = (place[part] ??= {}) as Record<string, unknown>;
    place[parts.at(-1)!] = value;
  }
  return found;
}

/** Keys that change while the experiment runs; one that cannot is refused by the gateway, with the reason. */
function Change({ experiment, shared, onClose }: { experiment: Experiment; shared: Shared; onClose: () => void }) {
  const [changes, setChanges] = useState("");
  const waiting = experiment.changes.filter((each) => each.version === null).flatMap((each) => each.keys.map((key) => key.path));
  return (
    <Dialog
      title={`Change ${experiment.name}`}
      verb="Change"
      onClose={onClose}
      onDo={async () => {
        await call(experimentPath(experiment.id), { method: "PATCH", json: changesOf(changes) });
        shared.refresh();
      }}
    >
      <label for="changes">Changes, one a line</label>
      <textarea
        id="changes"
        rows={5}
        required
        spellcheck={false}
        placeholder={"optimisation.learning_rate: 5e-7\nrollout.sampling.temperature: 0.8"}
        value={changes}
        onInput={(event) => setChanges(event.currentTarget.value)}
      />
      <p class="quiet">The trainer's settings hold from its next version on, a group's from the next one that is issued. What cannot change is refused with the reason.</p>
      {waiting.length > 0 && <p class="quiet">Changed already, and waiting for a version: {waiting.join(", ")}.</p>}
    </Dialog>
  );
}

function Fork({ experiment, shared, onClose }: { experiment: Experiment; shared: Shared; onClose: () => void }) {
  const [checkpoints, setCheckpoints] = useState<Checkpoint[] | null>(null);
  const [step, setStep] = useState("");
  const [name, setName] = useState(`${experiment.name}-fork`);
  const [changes, setChanges] = useState("");
  const [error, setError] = useState("");
  useEffect(() => {
    all<Checkpoint>(`${experimentPath(experiment.id)}/checkpoints`).then(setCheckpoints, (reason: unknown) => setError(String(reason)));
  }, []);
  return (
    <Dialog
      title={`Fork ${experiment.name}`}
      verb="Fork and start"
      onClose={onClose}
      onDo={async () => {
        const json = { step: step === "" ? null : Number(step), changes: { ...changesOf(changes), name } };
        await call(`${experimentPath(experiment.id)}/fork`, { method: "POST", json });
        shared.refresh();
      }}
    >
      <label for="fork-name">Name</label>
      <input id="fork-name" required value={name} onInput={(event) => setName(event.currentTarget.value)} />
      <label for="fork-step">Begin at</label>
      <select id="fork-step" value={step} onChange={(event) => setStep(event.currentTarget.value)}>
        <option value="">the newest checkpoint</option>
        {(checkpoints ?? []).toReversed().map((each) => (
          <option key={each.step} value={each.step}>
            step {each.step}, version {each.version}
          </option>
        ))}
      </select>
      {checkpoints?.length === 0 && <p class="bad">There is no checkpoint yet.</p>}
      {error && <p class="bad">{error}</p>}
      <label for="fork-changes">Changes, one a line</label>
      <textarea
        id="fork-changes"
        rows={5}
        spellcheck={false}
        placeholder={"optimisation.learning_rate: 5e-4\noptimisation.steps: 120"}
        value={changes}
        onInput={(event) => setChanges(event.currentTarget.value)}
      />
    </Dialog>
  );
}
