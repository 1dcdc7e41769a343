// An experiment whose steps a client of the Tinker API decides: there is no spec, and nothing to steer from here.
import { all, call, experimentPath, usePoll, type Checkpoint, type Experiment, type SeriesPage } from "./api";
import { Audit, auditOf } from "./audit";
import { clock, number } from "./format";
import type { Shared } from "./main";
import { Notices } from "./notices";
import { Sparkline } from "./sparkline";

interface Requests {
  accepted: number;
  answered: number;
  failed: number;
  waiting: number;
}

const SERIES = { "loss/total": "Loss (sum over tokens)", grad_norm: "Norm of the gradient", learning_rate: "Learning rate" };

export const isJob = (experiment: Experiment) => experiment.kind === "tinker";

export function Job({ id, shared }: { id: string; shared: Shared }) {
  const experiment = shared.experiments.find((each) => each.id === id)!;
  const path = experimentPath(id);
  const { data, error } = usePoll(
    async (signal) => ({
      requests: (await call<{ requests: Requests }>(`${path}/ledger`, { signal })).requests,
      series: (await call<SeriesPage>(`${path}/series`, { query: { names: Object.keys(SERIES).join(","), points: 400 }, signal })).items,
      checkpoints: await all<Checkpoint>(`${path}/checkpoints`, { signal }),
      audit: await auditOf(id, signal),
    }),
    experiment.state === "running" ? 3 : 30,
    id,
  );
  const made = shared.experiments.filter((each) => each.origin?.experiment_id === id);
  return (
    <section>
      <div class="heading">
        <h1>
          {experiment.name} <span class={`state ${experiment.state}`}>{experiment.state}</span>
          <span class="quiet small">{updates(experiment)}, by a client of the Tinker API</span>
        </h1>
      </div>
      <Notices experiment={experiment} />
      {error && <p class="notice bad">{error.message}</p>}
      {data === null && !error && <p class="quiet">Loading…</p>}
      {(experiment.origin || made.length > 0) && (
        <div class="panel">
          <h2>Lineage</h2>
          {experiment.origin && (
            <p>
              Began from <a href={link(experiment.origin.experiment_id)}>{experiment.origin.path}</a>, after {experiment.origin.step} updates.
            </p>
          )}
          {made.map((each) => (
            <p key={each.id}>
              <a href={link(each.id)}>{each.name}</a> began from {each.origin!.path}.
            </p>
          ))}
        </div>
      )}
      {data && (
        <>
          <div class="panel">
            <h2>Requests</h2>
            <p>
              {data.requests.accepted} accepted = {data.requests.answered} answered + {data.requests.failed} failed + {data.requests.waiting} waiting
            </p>
          </div>
          <div class="panel">
            <h2>Updates</h2>
            {data.series.length === 0 && <p class="quiet">There is none yet.</p>}
            <table>
              <tbody>
                {data.series.map((each) => (
                  <tr key={each.name}>
                    <td>{SERIES[each.name as keyof typeof SERIES]}</td>
                    <td>
                      <Sparkline values={[...each.values]} label={each.name} />
                    </td>
                    <td>{number(each.values.at(-1)!)}</td>
                    <td class="quiet">
                      updates {each.steps[0]} to {each.steps.at(-1)}
                    </td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
          <div class="panel">
            <h2>Checkpoints</h2>
            {data.checkpoints.length === 0 && <p class="quiet">There is none yet.</p>}
            <table>
              <tbody>
                {data.checkpoints.toReversed().map((each) => (
                  <tr key={each.path}>
                    <td>{each.step} updates</td>
                    <td>{clock(each.at)}</td>
                    <td class="wrap quiet">{each.path}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
          <Audit entries={data.audit} />
        </>
      )}
    </section>
  );
}

const link = (id: string) => `#/run/${encodeURIComponent(id)}`;
const updates = (experiment: Experiment) => `${experiment.step} ${experiment.step === 1 ? "update" : "updates"}`;

/** Its line among all experiments. */
export function JobRow({ experiment }: { experiment: Experiment }) {
  return (
    <li class="experiment">
      <div class="row">
        <div class="name">
          <h2>
            <a href={link(experiment.id)}>{experiment.name}</a>
            <span class={`state ${experiment.state}`}>{experiment.state}</span>
          </h2>
          <p class="quiet small">
            {experiment.id}
            {experiment.origin && ` · from ${experiment.origin.path}`}
          </p>
          <p class="small">{updates(experiment)}, by a client of the Tinker API</p>
        </div>
      </div>
      <Notices experiment={experiment} />
    </li>
  );
}
