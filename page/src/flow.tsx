// Where every group is: the ledger as a picture, the queues, what bounds the speed.
import { useEffect, useState } from "preact/hooks";
import { call, experimentPath, usePoll, type Diagnosis, type Experiment } from "./api";
import { duration, number, percent } from "./format";
import type { Shared } from "./main";
import { Publications } from "./publications";
import { Pools } from "./usage";
import { meaningOf } from "./reasons";
import { Head } from "./run";

interface Hops {
  tasks: number;
  generated: number;
  scored: number;
}
type Reasons = Record<string, number>;

/** As shared/streams/ledger.py writes one lane. */
interface Ledger {
  issued: number;
  waiting: Hops;
  claimed: Hops;
  planned: number;
  trained: number;
  filtered: Reasons;
  dropped: Reasons;
  failed: Reasons;
  outstanding: number;
  by_version?: { version: number; groups: number; oldest_seconds?: number | null }[];
  consumed_since_publication: number;
  tokens: { generated: number; scored: number; trained: number };
  lengths: Record<string, Record<string, Record<string, number>>>;
  balanced: boolean;
}
type Lane = "train" | "evaluation";

const HOPS = [
  ["tasks", "Tasks", "being sampled", "rollouts"],
  ["generated", "Generated", "being graded", "rewards"],
  ["scored", "Scored", "being planned", "trainer"],
] as const;
const ENDS = ["filtered", "dropped", "failed"] as const;
const total = (reasons: Reasons) => Object.values(reasons).reduce((sum, each) => sum + each, 0);
const whole = (value: number) => value.toLocaleString("en");

export function Flow({ id, shared }: { id: string; shared: Shared }) {
  const experiment = shared.experiments.find((each) => each.id === id)!;
  const [lane, setLane] = useState<Lane>("train");
  const isOver = ["completed", "stopped", "failed", "draft"].includes(experiment.state);
  const { data, error } = usePoll(
    async (signal) => {
      const [ledgers, diagnosis, episodes] = await Promise.all([
        call<Record<Lane, Ledger>>(`${experimentPath(id)}/ledger`, { signal }),
        call<Diagnosis>(`${experimentPath(id)}/diagnosis`, { signal }),
        call<Record<string, number>>(`${experimentPath(id)}/episodes`, { signal }),
      ]);
      return { ledgers, diagnosis, episodes };
    },
    isOver ? 30 : 2,
    id,
  );
  return (
    <section>
      <Head experiment={experiment} shared={shared} ids={[id]} />
      {error && <p class="notice bad">{error.message}</p>}
      {data === null ? (
        <p class="quiet">{error ? "" : "Loading…"}</p>
      ) : (
        <>
          <Bottleneck diagnosis={data.diagnosis} />
          <div class="heading">
            <h2>Where every group is</h2>
            <div class="buttons" role="group" aria-label="Lane">
              {(["train", "evaluation"] as const).map((each) => (
                <button key={each} class={each === lane ? "primary" : ""} aria-pressed={each === lane} onClick={() => setLane(each)}>
                  {each === "train" ? "Training" : "Evaluation"}
                </button>
              ))}
            </div>
          </div>
          <Picture ledger={data.ledgers[lane]} lane={lane} evidence={lane === "train" && !isOver ? (data.diagnosis.evidence as Record<string, number>) : {}} />
          {lane === "train" && <Queue ledger={data.ledgers.train} current={experiment.policy_version} />}
          {lane === "train" && <Admission experiment={experiment} ledger={data.ledgers.train} />}
          <Ends ledger={data.ledgers[lane]} lane={lane} />
          <Publications id={id} isOver={isOver} />
          <Pools id={id} />
          <Episodes id={id} counts={data.episodes} />
        </>
      )}
    </section>
  );
}

/** Of agents from outside; of an experiment that has none there is nothing to show. */
function Episodes({ id, counts }: { id: string; counts: Record<string, number> }) {
  const shown = Object.entries(counts);
  if (shown.every(([, count]) => count === 0)) return null;
  return (
    <div class="panel">
      <h2>Episodes of agents</h2>
      <p>
        {shown.map(([name, count], at) => (
          <span key={name}>
            {at > 0 && ", "}
            <b class="figure">{whole(count)}</b> {name.replaceAll("_", " ")}
          </span>
        ))}
      </p>
      <p class="quiet small">
        <code>GET {experimentPath(id)}/episodes</code>
      </p>
    </div>
  );
}

function Bottleneck({ diagnosis }: { diagnosis: Diagnosis }) {
  const shares = Object.entries(diagnosis.evidence as Record<string, number>).filter(([name]) => name.endsWith("_share"));
  return (
    <div class="panel">
      <h2>What bounds the speed</h2>
      <p class="large">
        <strong>{diagnosis.component}</strong> <span class="quiet">{diagnosis.cause}</span>
      </p>
      {diagnosis.advice && <p>{diagnosis.advice}</p>}
      {(diagnosis.failing ?? []).map((each) => (
        <p key={each.service_id} class="notice bad">
          <strong>{each.service_id}</strong> {each.cause}
        </p>
      ))}
      {shares.length > 0 && (
        <ul class="shares">
          {shares.map(([name, value]) => (
            <li key={name}>
              <span class="small">{name.replace("_share", "").replaceAll("_", " ").replace("/", ": ")}</span>
              <meter min={0} max={1} value={value} aria-label={name} />
              <span class="small figure">{percent(value)}</span>
            </li>
          ))}
        </ul>
      )}
      {diagnosis.window_seconds > 0 && <p class="quiet small">Shares of the last {duration(diagnosis.window_seconds)}, or of the looks in that time.</p>}
    </div>
  );
}

function Picture({ ledger, lane, evidence }: { ledger: Ledger; lane: Lane; evidence: Record<string, number> }) {
  const waiting = HOPS.reduce((sum, [hop]) => sum + ledger.waiting[hop], 0);
  const claimed = HOPS.reduce((sum, [hop]) => sum + ledger.claimed[hop], 0);
  const ends = Object.fromEntries(ENDS.map((end) => [end, total(ledger[end])])) as Record<(typeof ENDS)[number], number>;
  const sum = waiting + claimed + ledger.planned + ledger.trained + ends.filtered + ends.dropped + ends.failed;
  const parts: [string, number][] = [
    ["waiting", waiting],
    ["claimed", claimed],
    ["planned", ledger.planned],
    [lane === "train" ? "trained" : "recorded", ledger.trained],
    ...ENDS.map((end): [string, number] => [end, ends[end]]),
  ];
  let from = 0;
  return (
    <div class="panel">
      <ol class="stream">
        <li>
          <h3>Issued</h3>
          <b class="figure">{whole(ledger.issued)}</b>
        </li>
        {HOPS.map(([hop, label, doing, by]) => (
          <li key={hop}>
            <h3>{label}</h3>
            <p>
              <b class="figure">{whole(ledger.waiting[hop])}</b> waiting
            </p>
            <p>
              <b class="figure">{whole(ledger.claimed[hop])}</b> {doing}
            </p>
            <p class="quiet small">
              {by}
              {evidence[`${hop}/oldest_seconds`] ? `, oldest for ${duration(evidence[`${hop}/oldest_seconds`]!)}` : ""}
            </p>
          </li>
        ))}
        {lane === "train" && (
          <li>
            <h3>Planned</h3>
            <b class="figure">{whole(ledger.planned)}</b>
            <p class="quiet small">in a step; its checkpoint is pending</p>
          </li>
        )}
        <li class="last">
          <h3>{lane === "train" ? "Trained" : "Recorded"}</h3>
          <b class="figure">{whole(ledger.trained)}</b>
          <p class="quiet small">{lane === "train" ? "in a durable checkpoint" : "in an evaluation's result"}</p>
        </li>
      </ol>
      <svg class="bar" viewBox="0 0 1000 26" preserveAspectRatio="none" role="img" aria-label={`Of ${ledger.issued} groups: ${parts.map(([name, count]) => `${count} ${name}`).join(", ")}`}>
        {parts.map(([name, count], at) => {
          const width = sum > 0 ? (1000 * count) / sum : 0;
          const start = from;
          from += width;
          return <rect key={name} class={`fill-${at}`} x={start} y={0} width={width} height={26} />;
        })}
      </svg>
      <p class="sum">
        <span>
          issued <b id="issued">{whole(ledger.issued)}</b>
        </span>
        {" = "}
        {parts.map(([name, count], at) => (
          <span key={name}>
            {at > 0 && " + "}
            <i class={`ink ink-${at}`} />
            {name} <b class="part">{whole(count)}</b>
          </span>
        ))}{" "}
        {sum === ledger.issued && ledger.balanced ? <span class="good">adds up</span> : <span class="bad">does not add up: the parts make {whole(sum)}</span>}
      </p>
      <p class="quiet small">
        Tokens of answers: {number(ledger.tokens.generated)} generated, {number(ledger.tokens.scored)} scored, {number(ledger.tokens.trained)} trained.
      </p>
    </div>
  );
}

/** What is on its way, by the version that it was issued or sampled under. */
function Queue({ ledger, current }: { ledger: Ledger; current: number }) {
  const rows = ledger.by_version ?? [];
  if (rows.length === 0) return null;
  const most = Math.max(...rows.map((each) => each.groups));
  return (
    <div class="panel queue">
      <h2>On its way, by version</h2>
      <table>
        <thead>
          <tr>
            <th scope="col">Version</th>
            <th scope="col">Behind</th>
            <th scope="col">Groups</th>
            <th scope="col">Share</th>
            <th scope="col">Oldest</th>
          </tr>
        </thead>
        <tbody>
          {rows.map((each) => (
            <tr key={each.version}>
              <td>{each.version}</td>
              <td class="figure">{Math.max(0, current - each.version)}</td>
              <td class="figure">{whole(each.groups)}</td>
              <td>
                <meter min={0} max={most} value={each.groups} aria-label={`${each.groups} groups of version ${each.version}`} />
              </td>
              <td class="figure">{each.oldest_seconds === null || each.oldest_seconds === undefined ? "–" : duration(each.oldest_seconds)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** The budget of asynchrony: R groups a step, T steps a version, and the surplus that may run ahead. */
function Admission({ experiment, ledger }: { experiment: Experiment; ledger: Ledger }) {
  const [budget, setBudget] = useState<number | null>(null);
  useEffect(() => {
    const ending = new AbortController();
    call<Experiment>(experimentPath(experiment.id), { signal: ending.signal }).then(
      ({ spec }) => setBudget(budgetOf(spec)),
      () => {},
    );
    return () => ending.abort();
  }, [experiment.id, experiment.revision]);
  if (budget === null) return null;
  const used = ledger.outstanding + ledger.consumed_since_publication;
  const isFull = used >= budget;
  return (
    <div class="panel">
      <h2>Admission</h2>
      <p>
        <b class="figure">{whole(ledger.outstanding)}</b> outstanding + <b class="figure">{whole(ledger.consumed_since_publication)}</b> consumed since the last publication ={" "}
        <b class="figure">{whole(used)}</b> of a budget of <b class="figure">{whole(budget)}</b> groups
      </p>
      <meter class="wide" min={0} max={budget} value={Math.min(used, budget)} aria-label="budget in use" />
      <p class="quiet small">
        {isFull
          ? "The budget is used up: nothing is issued until groups end, or a version is published. This bounds how stale a token can become; asynchrony.staleness_threshold raises it."
          : "There is room: groups are issued as fast as they can be taken."}
      </p>
    </div>
  );
}

type Section = Record<string, unknown>;

/** As ExperimentSpec.admission_budget computes it; null for jobs on finished answers, which have another. */
export function budgetOf(spec: Record<string, unknown>): number | null {
  const asynchrony = spec.asynchrony as Section | undefined;
  const optimisation = spec.optimisation as Section | undefined;
  const groups = optimisation?.groups_per_mini_batch;
  const batches = asynchrony?.require_batches;
  const steps = asynchrony?.trigger_parameter_sync_step;
  const surplus = asynchrony?.staleness_threshold;
  const isRl = (spec.job as Section | undefined)?.kind === "rl";
  if (!isRl || typeof groups !== "number" || typeof batches !== "number" || typeof steps !== "number" || typeof surplus !== "number") return null;
  return Math.floor(groups * batches * steps * (1 + surplus) + 1e-9);
}

function Ends({ ledger, lane }: { ledger: Ledger; lane: Lane }) {
  const rows = ENDS.flatMap((end) => Object.entries(ledger[end]).map(([reason, count]) => ({ end, reason, count, lengths: ledger.lengths[end]?.[reason] ?? {} }))).filter(({ count }) => count > 0);
  if (rows.length === 0) return null;
  return (
    <div class="panel">
      <h2>{lane === "train" ? "What was not trained, and why" : "What was not recorded, and why"}</h2>
      <table>
        <thead>
          <tr>
            <th scope="col">Groups</th>
            <th scope="col">End</th>
            <th scope="col">Reason</th>
            <th scope="col">By sampled tokens of the group</th>
          </tr>
        </thead>
        <tbody>
          {rows.map(({ end, reason, count, lengths }) => (
            <tr key={end + reason}>
              <td>{whole(count)}</td>
              <td>{end}</td>
              <td class="wrap">{meaningOf(reason)}</td>
              <td class="wrap">
                {Object.entries(lengths)
                  .map(([most, groups]) => `${whole(groups)} up to ${whole(Number(most))}`)
                  .join(", ")}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
