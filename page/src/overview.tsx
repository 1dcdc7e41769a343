import { useMemo, useRef, useState } from "preact/hooks";
import { usePoll, type Experiment } from "./api";
import { Actions } from "./actions";
import { clock, duration, number, percent } from "./format";
import { isJob, JobRow } from "./job";
import type { Shared } from "./main";
import { Notices } from "./notices";
import { recent, SeriesOf } from "./series";
import { Sparkline } from "./sparkline";

const NAMES = ["reward/mean", "evaluation/accuracy", "evaluation/reward_mean", "time/step_seconds", "tokens/trained_in_step", "held_out/loss"];
const POINTS = 200;
const RECENT_STEPS = 10;
const AT_WORK = new Set<Experiment["state"]>(["starting", "running", "paused", "stopping"]);

/** Series of all experiments: of one that has ended they are asked for once. */
function useLatest(experiments: Experiment[]): Map<string, SeriesOf> {
  const kept = useRef(new Map<string, { series: SeriesOf; seen: string }>());
  const latest = useRef(experiments);
  latest.current = experiments;
  const { data } = usePoll(
    async (signal) => {
      for (const each of latest.current.filter((one) => !isJob(one))) {
        const known = kept.current.get(each.id) ?? { series: new SeriesOf(each.id, NAMES, POINTS), seen: "" };
        const now = `${each.state} ${each.updated_at} ${each.step}`;
        if (known.seen !== now || AT_WORK.has(each.state)) await known.series.update(signal);
        kept.current.set(each.id, { ...known, seen: now });
      }
      return new Map([...kept.current].map(([id, { series }]) => [id, series]));
    },
    3,
    experiments.map((each) => each.id).join(),
  );
  return data ?? new Map<string, SeriesOf>();
}

export function Overview({ shared }: { shared: Shared }) {
  const latest = useLatest(shared.experiments);
  const [chosen, setChosen] = useState<ReadonlySet<string>>(new Set());
  const shown = useMemo(() => shared.experiments.toReversed(), [shared.experiments]);
  const compared = shown.filter((each) => chosen.has(each.id));
  const toggle = (id: string) => {
    const next = new Set(chosen);
    if (!next.delete(id)) next.add(id);
    setChosen(next);
  };
  return (
    <section>
      <div class="heading">
        <h1>Experiments</h1>
        <div class="buttons">
          {compared.length > 1 && (
            <a class="button" href={`#/run/${compared.map((each) => encodeURIComponent(each.id)).join(",")}`}>
              Compare {compared.length}
            </a>
          )}
          {shared.isOperator && (
            <a class="button primary" href="#/new">
              New experiment
            </a>
          )}
        </div>
      </div>
      {shown.length === 0 && (
        <p class="quiet">
          There is none yet. {shared.isOperator ? "Create one here, or start one with " : "An operator starts one with "}
          <code>flotilla start SPEC</code>.
        </p>
      )}
      <ul class="experiments">
        {shown.map((each) =>
          isJob(each) ? (
            <JobRow key={each.id} experiment={each} />
          ) : (
            <Row
              key={each.id}
              experiment={each}
              series={latest.get(each.id)}
              shared={shared}
              isChosen={chosen.has(each.id)}
              onChoose={shown.length > 1 ? () => toggle(each.id) : null}
            />
          ),
        )}
      </ul>
    </section>
  );
}

function Row(props: { experiment: Experiment; series: SeriesOf | undefined; shared: Shared; isChosen: boolean; onChoose: (() => void) | null }) {
  const { experiment, series } = props;
  const reward = series?.get("reward/mean");
  const accuracy = series?.get("evaluation/accuracy") ?? series?.get("evaluation/reward_mean");
  const seconds = recent(series?.get("time/step_seconds"), RECENT_STEPS);
  const tokens = recent(series?.get("tokens/trained_in_step"), RECENT_STEPS);
  const left = experiment.state === "running" && seconds !== null ? seconds * (experiment.total_steps - experiment.step) : null;
  const share = experiment.total_steps > 0 ? experiment.step / experiment.total_steps : 0;
  const first = accuracy?.values[0];
  const last = accuracy?.values.at(-1);
  return (
    <li class="experiment">
      <div class="row">
        <div class="name">
          <h2>
            {props.onChoose && (
              <input type="checkbox" checked={props.isChosen} onChange={props.onChoose} aria-label={`Compare ${experiment.name}`} title="compare" />
            )}
            <a href={`#/run/${encodeURIComponent(experiment.id)}`}>{experiment.name}</a>
            <span class={`state ${experiment.state}`}>{experiment.state}</span>
          </h2>
          <p class="quiet small">
            {experiment.id}
            {experiment.origin && ` · from step ${experiment.origin.step} of ${experiment.origin.experiment_id}`}
          </p>
          <progress value={experiment.step} max={Math.max(1, experiment.total_steps)} aria-label={`step ${experiment.step} of ${experiment.total_steps}`} />
          <p class="small">
            step {experiment.step} of {experiment.total_steps} ({Math.floor(100 * share)} %), version {experiment.policy_version}
          </p>
        </div>
        <dl class="figures">
          <div class="wide">
            <dt>Reward</dt>
            <dd>
              {number(reward?.values.at(-1))}
              {reward && <Sparkline values={reward.values} label={`reward of ${experiment.name} over its steps`} />}
            </dd>
          </div>
          <div>
            <dt>Held out</dt>
            <dd>
              {series?.get("evaluation/accuracy") ? percent(last) : number(last)}
              {first !== undefined && accuracy!.values.length > 1 && (
                <span class="quiet small from">from {series?.get("evaluation/accuracy") ? percent(first) : number(first)}</span>
              )}
            </dd>
          </div>
          <div>
            <dt>Speed</dt>
            <dd>
              {tokens !== null && seconds ? number(tokens / seconds) : "–"} <span class="quiet small">tokens/s</span>
            </dd>
          </div>
          <div>
            <dt>{AT_WORK.has(experiment.state) ? "Time left" : experiment.state === "draft" ? "Created" : "Ended"}</dt>
            <dd>{AT_WORK.has(experiment.state) ? duration(left) : clock(experiment.state === "draft" ? experiment.created_at : experiment.updated_at)}</dd>
          </div>
        </dl>
        <Actions experiment={experiment} shared={props.shared} />
      </div>
      <Notices experiment={experiment} />
    </li>
  );
}
