// What came from what: forks, checkpoints, the groups of a step, evaluations.
import { useEffect, useRef, useState } from "preact/hooks";
import { all, call, experimentPath, Refused, usePoll, type Checkpoint, type Experiment, type Step } from "./api";
import { clock, number, percent } from "./format";
import type { Route, Shared } from "./main";
import { Head } from "./run";
import { SeriesOf } from "./series";

export function Lineage({ id, route, shared }: { id: string; route: Route; shared: Shared }) {
  const experiment = shared.experiments.find((each) => each.id === id)!;
  const series = useRef(new SeriesOf(id, ["evaluation/*"], 1000));
  const isOver = ["completed", "stopped", "failed", "draft"].includes(experiment.state);
  const { data, error } = usePoll(
    async (signal) => {
      await series.current.update(signal);
      return { checkpoints: await all<Checkpoint>(`${experimentPath(id)}/checkpoints`, { signal }) };
    },
    isOver ? 30 : 5,
    id,
  );
  return (
    <section>
      <Head experiment={experiment} shared={shared} ids={[id]} />
      {error && <p class="notice bad">{error.message}</p>}
      <Tree experiment={experiment} experiments={shared.experiments} />
      <StepPanel key={route.query.get("step")} experiment={experiment} step={route.query.get("step") ?? ""} />
      <Evaluations id={id} series={series.current} />
      {data && (
        <div class="panel">
          <h2>Checkpoints</h2>
          {data.checkpoints.length === 0 ? (
            <p class="quiet">There is none yet.</p>
          ) : (
            <table>
              <thead>
                <tr>
                  <th scope="col">Step</th>
                  <th scope="col">Version</th>
                  <th scope="col">Made</th>
                  <th scope="col">Copy</th>
                  <th scope="col">Folder</th>
                </tr>
              </thead>
              <tbody>
                {data.checkpoints.toReversed().map((each) => (
                  <tr key={each.step}>
                    <td>
                      <a href={stepLink(id, each.step)}>{each.step}</a>
                    </td>
                    <td>{each.version}</td>
                    <td>{clock(each.at)}</td>
                    <td>{each.upload ? each.upload.state : "–"}</td>
                    <td class="wrap quiet">{each.path}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          )}
        </div>
      )}
    </section>
  );
}

const stepLink = (id: string, step: number) => `#/lineage/${encodeURIComponent(id)}?step=${step}`;

/** All that began from the same experiment. */
function Tree({ experiment, experiments }: { experiment: Experiment; experiments: Experiment[] }) {
  const byId = new Map(experiments.map((each) => [each.id, each]));
  let root = experiment;
  const seen = new Set<string>();
  while (root.origin && byId.has(root.origin.experiment_id) && !seen.has(root.id)) {
    seen.add(root.id);
    root = byId.get(root.origin.experiment_id)!;
  }
  const node = (each: Experiment, depth: number) => {
    const children = depth < 50 ? experiments.filter((other) => other.origin?.experiment_id === each.id && other.id !== each.id) : [];
    return (
      <li key={each.id}>
        <a href={`#/lineage/${encodeURIComponent(each.id)}`} aria-current={each.id === experiment.id ? "page" : undefined}>
          {each.name}
        </a>{" "}
        <span class={`state ${each.state}`}>{each.state}</span>{" "}
        <span class="quiet small">
          {each.origin ? `from step ${each.origin.step}, version ${each.origin.version}; ` : ""}step {each.step} of {each.total_steps}
        </span>
        {children.length > 0 && <ul>{children.map((child) => node(child, depth + 1))}</ul>}
      </li>
    );
  };
  return (
    <div class="panel">
      <h2>Forks</h2>
      {root.origin && (
        <p class="quiet small">
          It begins with a checkpoint of {root.origin.experiment_id}, step {root.origin.step}, which is not here.
        </p>
      )}
      <ul class="tree">{node(root, 0)}</ul>
    </div>
  );
}

function StepPanel({ experiment, step }: { experiment: Experiment; step: string }) {
  const [found, setFound] = useState<Step | null>(null);
  const [error, setError] = useState("");
  const id = encodeURIComponent(experiment.id);
  useEffect(() => {
    if (step === "") return undefined;
    const ending = new AbortController();
    call<Step>(`${experimentPath(experiment.id)}/steps/${encodeURIComponent(step)}`, { signal: ending.signal }).then(setFound, (reason: unknown) => {
      if (!ending.signal.aborted) setError(reason instanceof Refused ? reason.message : String(reason));
    });
    return () => ending.abort();
  }, [experiment.id, step]);
  return (
    <div class="panel">
      <h2>A step and its groups</h2>
      <form
        class="toolbar"
        onSubmit={(event) => {
          event.preventDefault();
          const value = new FormData(event.currentTarget).get("step");
          location.hash = stepLink(experiment.id, Number(value));
        }}
      >
        <label>
          Step <input class="short" name="step" type="number" min={0} required defaultValue={step} />
        </label>
        <button>Show</button>
      </form>
      {error && <p class="bad">{error}</p>}
      {found && (
        <>
          <p>
            It {found.is_committed ? "trained" : "trains"} {found.group_ids.length} groups with {number(found.token_count)} sampled tokens, under version {found.version}; they were sampled by{" "}
            {found.oldest_version === found.newest_version ? `version ${found.newest_version}` : `versions ${found.oldest_version} to ${found.newest_version}`}.{" "}
            {found.is_committed ? "A durable checkpoint has it." : "No durable checkpoint has it yet."} <a href={`#/samples/${id}?kind=trained&step=${found.step}`}>Its samples</a>
          </p>
          <p class="small">
            Groups:{" "}
            {found.group_ids.map((group) => (
              <>
                <a key={group} href={`#/samples/${id}?kind=trained&group=${group}`}>
                  {group}
                </a>{" "}
              </>
            ))}
          </p>
        </>
      )}
    </div>
  );
}

const COUNTS = /^(num_|mean_completion|lag_versions)/;

function Evaluations({ id, series }: { id: string; series: SeriesOf }) {
  // Of the held-out set as a whole; named sets and sources have charts.
  const names = [...series.columns.keys()].map((name) => name.replace(/^evaluation\//, "")).filter((name) => !name.includes("/"));
  if (names.length === 0) return null;
  const first = ["accuracy", "reward_mean"].filter((name) => names.includes(name));
  const at = names.filter((name) => name.includes("@")).sort((one, other) => one.localeCompare(other, "en", { numeric: true }));
  const counts = names.filter((name) => COUNTS.test(name)).sort();
  const columns = [...first, ...at, ...counts];
  const steps = [...new Set(columns.flatMap((name) => series.get(`evaluation/${name}`)!.steps))].sort((one, other) => other - one);
  const cell = (name: string, step: number) => {
    const column = series.get(`evaluation/${name}`)!;
    const place = column.steps.indexOf(step);
    const value = place < 0 ? null : column.values[place]!;
    return name === "accuracy" || name.startsWith("pass@") ? percent(value) : number(value);
  };
  const versionAt = (step: number) => {
    const column = series.get(`evaluation/${columns[0]!}`)!;
    return column.versions[column.steps.indexOf(step)] ?? "–";
  };
  return (
    <div class="panel evaluations">
      <h2>Evaluations</h2>
      <table>
        <thead>
          <tr>
            <th scope="col">Step</th>
            <th scope="col">Version</th>
            {columns.map((name) => (
              <th scope="col" key={name}>
                {name.replaceAll("_", " ")}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {steps.map((step) => (
            <tr key={step}>
              <td>
                <a href={`#/samples/${encodeURIComponent(id)}?kind=evaluation&step=${step}`}>{step}</a>
              </td>
              <td>{versionAt(step)}</td>
              {columns.map((name) => (
                <td key={name}>{cell(name, step)}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
