// Who works for whom: services, what they do now and did while this page was open, and the shares of the experiments.
import { useEffect, useRef, useState } from "preact/hooks";
import type { ComponentChildren } from "preact";
import { all, call, usePoll, type FleetView, type Service, type Webhook } from "./api";
import { Dialog } from "./dialog";
import { duration, number } from "./format";
import type { Shared } from "./main";
import { colours } from "./palette";
import { Publications } from "./publications";
import { useTheme } from "./run";
import { ServiceLog } from "./servicelog";

const KINDS = ["trainer", "rollout", "reward", "sandbox"];
const KEPT = 100;
const SECONDS = 3;
/** More services than these are a heat map, and the table is folded up. */
const MOST_LANES = 64;
const ROW = 4;
/** Experiments whose publications are shown here; each asks for its own. */
const MOST_PUBLISHING = 3;

/** How busy a service is now, from 0 to 1. */
function busyOf(service: Service, before: Service | undefined): number {
  const load = service.observed.load as Record<string, number>;
  const earlier = before?.observed.load as Record<string, number> | undefined;
  if (load.busy_seconds !== undefined && load.idle_seconds !== undefined && earlier?.busy_seconds !== undefined) {
    const busy = load.busy_seconds - earlier.busy_seconds;
    const all = busy + load.idle_seconds - (earlier.idle_seconds ?? 0);
    if (all > 0) return Math.min(1, Math.max(0, busy / all));
  }
  if (load.groups_in_work !== undefined) return load.groups_in_work > 0 ? 1 : 0;
  return service.observed.state === "running" ? 1 : 0;
}

function doingOf(service: Service): string {
  const load = service.observed.load as Record<string, number>;
  const has = (name: string) => load[name] !== undefined;
  if (service.kind === "rollout" && has("slots")) return `${number(load.running!)} of ${number(load.slots!)} slots, ${number(load.tokens_per_second ?? 0)} tokens/s`;
  if (service.kind === "reward" && has("graded_samples")) return `${number(load.graded_samples!)} samples graded, ${number(load.failed_samples ?? 0)} failed`;
  if (service.kind === "sandbox" && has("runs")) return `${number(load.running ?? 0)} running, ${number(load.waiting ?? 0)} waiting`;
  if (service.kind === "trainer" && has("ready_groups")) return `${number(load.ready_groups!)} groups ready`;
  return "";
}

export function Fleet({ shared }: { shared: Shared }) {
  const history = useRef(new Map<string, number[]>());
  const before = useRef(new Map<string, Service>());
  const began = useRef(Date.now());
  const { data, error, refresh } = usePoll(
    async (signal) => {
      const [fleet, services] = await Promise.all([call<FleetView>("/v1/fleet", { signal }), all<Service>("/v1/services", { signal })]);
      for (const service of services) {
        const kept = history.current.get(service.service_id) ?? [];
        kept.push(busyOf(service, before.current.get(service.service_id)));
        history.current.set(service.service_id, kept.slice(-KEPT));
        before.current.set(service.service_id, service);
      }
      return { fleet, services };
    },
    SECONDS,
    "fleet",
  );
  const nameOf = (id: string | null | undefined) => shared.experiments.find((each) => each.id === id)?.name ?? id ?? "";
  if (data === null) return error ? <p class="notice bad">{error.message}</p> : <p class="quiet">Loading…</p>;
  const services = data.services.toSorted((one, other) => KINDS.indexOf(one.kind) - KINDS.indexOf(other.kind));
  return (
    <section>
      <div class="heading">
        <h1>Fleet</h1>
        <span class="quiet small">
          {KINDS.map((kind) => `${services.filter((each) => each.kind === kind).length} ${kind}`).join(", ")}
        </span>
      </div>
      {error && <p class="notice bad">{error.message}</p>}
      <div class="panel">
        <h2>Services</h2>
        {services.length === 0 && <p class="quiet">None has registered.</p>}
        {services.length > MOST_LANES && <HeatMap services={services} history={history.current} />}
        {services.length > 0 && <Folded is={services.length > MOST_LANES} summary={`All ${services.length} services`}>
        <table>
          <thead>
            <tr>
              <th scope="col">Service</th>
              <th scope="col">Host</th>
              <th scope="col">Works for</th>
              <th scope="col">State</th>
              <th scope="col">Serves</th>
              <th scope="col" title="since this page was opened">Busy, last {duration(Math.min(KEPT * SECONDS, (Date.now() - began.current) / 1000))}</th>
              <th scope="col">Does</th>
              <th scope="col">Lease</th>
              {shared.isOperator && <th scope="col" aria-label="Actions" />}
            </tr>
          </thead>
          <tbody>
            {services.map((each) => (
              <tr key={each.service_id}>
                <td>{each.service_id}</td>
                <td class="quiet">
                  {each.host}
                  {each.capabilities.pool && <span class="small">, {each.capabilities.pool}</span>}
                </td>
                <td>{each.experiment_id ? <a href={`#/flow/${encodeURIComponent(each.experiment_id)}`}>{nameOf(each.experiment_id)}</a> : <span class="quiet">nobody</span>}</td>
                <td class="wrap">
                  {each.is_draining ? "draining" : each.observed.state}
                  {each.leaving && <span class="quiet">, {each.leaving}</span>}
                  {each.observed.failure && <span class="bad"> {each.observed.failure.cause}</span>}
                </td>
                <td>
                  {each.observed.policy_version === null || each.observed.policy_version === undefined ? "" : `version ${each.observed.policy_version}`}
                  {each.observed.publication?.checksum && <span class="quiet small"> {each.observed.publication.checksum}</span>}
                </td>
                <td>
                  <Lane values={history.current.get(each.service_id) ?? []} name={each.service_id} />
                </td>
                <td>{doingOf(each)}</td>
                <td class="quiet">{duration(each.lease_expires_in_seconds)}</td>
                {shared.isOperator && (
                  <td>
                    {!each.is_draining && each.kind === "rollout" && <Drain service={each} onDone={refresh} />}
                  </td>
                )}
              </tr>
            ))}
          </tbody>
        </table>
        </Folded>}
      </div>
      <Graders services={services} nameOf={nameOf} />
      <Sandboxes services={services} />
      {shared.experiments
        .filter((each) => each.kind !== "tinker" && each.state === "running")
        .slice(0, MOST_PUBLISHING)
        .map((each) => (
          <Publications key={each.id} id={each.id} isOver={false} of={each.name} />
        ))}
      {shared.isOperator && <Webhooks />}
      {shared.isOperator && services.length > 0 && <LogOfService services={services} />}
      <div class="panel">
        <h2>Shares</h2>
        {data.fleet.experiments.length === 0 ? (
          <p class="quiet">No experiment is at work.</p>
        ) : (
          <table>
            <thead>
              <tr>
                <th scope="col">Experiment</th>
                <th scope="col">Weight</th>
                <th scope="col">Priority</th>
                {KINDS.map((kind) => (
                  <th scope="col" key={kind}>
                    {kind}
                  </th>
                ))}
                <th scope="col">Waits for, lends</th>
              </tr>
            </thead>
            <tbody>
              {data.fleet.experiments.map((each) => (
                <tr key={each.experiment_id}>
                  <td>
                    <a href={`#/run/${encodeURIComponent(each.experiment_id)}`}>{each.name}</a> <span class={`state ${each.state}`}>{each.state}</span>
                  </td>
                  <td>{each.weight}</td>
                  <td>{each.priority}</td>
                  {KINDS.map((kind) => {
                    const share = each.kinds[kind];
                    return <td key={kind}>{share ? `${share.services.length} of ${share.share} (${share.min} to ${share.max ?? "any"})` : "–"}</td>;
                  })}
                  <td class="wrap">{each.waiting ?? each.lending ?? ""}</td>
                </tr>
              ))}
            </tbody>
          </table>
        )}
      </div>
    </section>
  );
}

/** What the components of rewards took and how often they gave no grade, over the services of an experiment. */
function Graders({ services, nameOf }: { services: Service[]; nameOf: (id: string | null | undefined) => string }) {
  const rows = new Map<string, { experiment: string | null | undefined; name: string; calls: number; samples: number; errors: number; abstained: number; seconds: number; slowest: number; by: number }>();
  for (const service of services) {
    for (const [name, each] of Object.entries(service.observed.grading?.graders ?? {})) {
      const key = `${service.observed.experiment_id} ${name}`;
      const row = rows.get(key) ?? { experiment: service.observed.experiment_id, name, calls: 0, samples: 0, errors: 0, abstained: 0, seconds: 0, slowest: 0, by: 0 };
      rows.set(key, {
        ...row,
        calls: row.calls + (each.calls ?? 0),
        samples: row.samples + (each.samples ?? 0),
        errors: row.errors + (each.errors ?? 0),
        abstained: row.abstained + (each.abstained ?? 0),
        seconds: row.seconds + (each.seconds ?? 0),
        slowest: Math.max(row.slowest, each.slowest_seconds ?? 0),
        by: row.by + 1,
      });
    }
  }
  if (rows.size === 0) return null;
  return (
    <div class="panel graders">
      <h2>Graders</h2>
      <table>
        <Columns names={["Component", "Experiment", "Calls", "Mean", "Slowest", "Samples", "Errors", "Abstained"]} />
        <tbody>
          {[...rows.entries()].map(([key, row]) => (
            <tr key={key}>
              <td>{row.name}</td>
              <td class="quiet">{nameOf(row.experiment)}</td>
              <td class="figure">{number(row.calls)}</td>
              <td class="figure">{row.calls > 0 ? took(row.seconds / row.calls) : "–"}</td>
              <td class="figure">{took(row.slowest)}</td>
              <td class="figure">{number(row.samples)}</td>
              <td class={row.errors > 0 ? "figure bad" : "figure"}>{number(row.errors)}</td>
              <td class="figure">{number(row.abstained)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <p class="quiet small">
        Since each reward service began with its experiment, repetitions included. <code>GET /v1/services?kind=reward</code>: <code>observed.grading.graders</code>
      </p>
    </div>
  );
}

function Sandboxes({ services }: { services: Service[] }) {
  const found = services.filter((each) => each.kind === "sandbox" && (each.observed.load as Record<string, number>).runs !== undefined);
  if (found.length === 0) return null;
  return (
    <div class="panel sandboxes">
      <h2>Sandboxes</h2>
      <table>
        <Columns names={["Service", "Programs", "Mean", "Running", "Waiting", "Sandbox errors", "Calls refused", "Cells of sessions"]} />
        <tbody>
          {found.map((each) => {
            const load = each.observed.load as Record<string, number>;
            const of = (name: string) => load[name] ?? 0;
            return (
              <tr key={each.service_id}>
                <td>{each.service_id}</td>
                <td class="figure">{number(of("runs"))}</td>
                <td class="figure">{of("runs") > 0 ? took(of("run_seconds") / of("runs")) : "–"}</td>
                <td class="figure">{number(of("running"))}</td>
                <td class="figure">{number(of("waiting"))}</td>
                <td class={of("run_errors") > 0 ? "figure bad" : "figure"}>{number(of("run_errors"))}</td>
                <td class={of("refused_calls") > 0 ? "figure bad" : "figure"}>{number(of("refused_calls"))}</td>
                <td class="figure">{number(of("cells"))}</td>
              </tr>
            );
          })}
        </tbody>
      </table>
      <p class="quiet small">
        Since each was started. <code>GET /v1/services?kind=sandbox</code>: <code>observed.load</code>
      </p>
    </div>
  );
}

function Columns({ names }: { names: string[] }) {
  return (
    <thead>
      <tr>
        {names.map((each) => (
          <th scope="col" key={each}>
            {each}
          </th>
        ))}
      </tr>
    </thead>
  );
}

const took = (seconds: number): string => (seconds < 1 ? `${Math.round(1000 * seconds)} ms` : duration(seconds));

function LogOfService({ services }: { services: Service[] }) {
  const [chosen, setChosen] = useState("gateway");
  return (
    <>
      <div class="toolbar">
        <label>
          Log of{" "}
          <select value={chosen} onChange={(event) => setChosen(event.currentTarget.value)}>
            <option>gateway</option>
            {services.map((each) => (
              <option key={each.service_id}>{each.service_id}</option>
            ))}
          </select>
        </label>
      </div>
      <ServiceLog key={chosen} serviceId={chosen} />
    </>
  );
}

function Folded({ is, summary, children }: { is: boolean; summary: string; children: ComponentChildren }) {
  return is ? (
    <details>
      <summary>{summary}</summary>
      {children}
    </details>
  ) : (
    <>{children}</>
  );
}

/** How busy many services were: a row for each, a column for each look, the fuller the busier. */
function HeatMap({ services, history }: { services: Service[]; history: Map<string, number[]> }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [shown, setShown] = useState("");
  const theme = useTheme();
  const looks = Math.max(0, ...services.map((each) => history.get(each.service_id)?.length ?? 0));
  const last = services.map((each) => history.get(each.service_id)?.at(-1) ?? 0).join();
  useEffect(() => {
    const context = canvas.current!.getContext("2d")!;
    context.clearRect(0, 0, KEPT, services.length * ROW);
    context.fillStyle = colours().lines[0]!;
    services.forEach((each, row) => {
      const values = history.get(each.service_id) ?? [];
      values.forEach((value, at) => {
        context.globalAlpha = 0.08 + 0.92 * value;
        context.fillRect(KEPT - values.length + at, row * ROW, 1, ROW - 1);
      });
    });
  }, [looks, last, services.length, theme]);
  const mean = (kind: string) => {
    const values = services.filter((each) => each.kind === kind).flatMap((each) => history.get(each.service_id) ?? []);
    return values.length > 0 ? `${kind} ${Math.round((100 * values.reduce((sum, each) => sum + each, 0)) / values.length)} %` : null;
  };
  const means = KINDS.map(mean).filter((each) => each !== null).join(", ");
  return (
    <>
      <p class="small quiet">Busy since this page was opened: {means}. A row is a service, in the order of the table; a column is a look{shown ? `. ${shown}` : ""}</p>
      <canvas
        class="heat"
        ref={canvas}
        width={KEPT}
        height={services.length * ROW}
        style={{ height: `${services.length * ROW}px` }}
        role="img"
        aria-label={`how busy ${services.length} services were: ${means}`}
        onMouseMove={(event) => {
          const each = services[Math.floor(event.offsetY / ROW)];
          setShown(each ? `${each.service_id}: ${Math.round(100 * (history.get(each.service_id)?.at(-1) ?? 0))} % now` : "");
        }}
        onMouseLeave={() => setShown("")}
      />
    </>
  );
}

/** How busy a service was: a column for each look, as high as its share. */
function Lane({ values, name }: { values: number[]; name: string }) {
  const mean = values.length > 0 ? values.reduce((sum, each) => sum + each, 0) / values.length : 0;
  return (
    <svg class="lane" viewBox={`0 0 ${KEPT} 20`} preserveAspectRatio="none" role="img" aria-label={`${name} was busy ${Math.round(100 * mean)} % of the time`}>
      {values.map((value, at) => (
        <rect key={at} x={KEPT - values.length + at} width={1} y={20 - 20 * value} height={20 * value} />
      ))}
    </svg>
  );
}

/** How deliveries to the operator's web hooks go; nothing where there are none. */
function Webhooks() {
  const { data } = usePoll((signal) => all<Webhook>("/v1/webhooks", { signal }), 10, "webhooks");
  if (data === null || data.length === 0) return null;
  return (
    <div class="panel webhooks">
      <h2>Web hooks</h2>
      <table>
        <thead>
          <tr>
            <th scope="col">To</th>
            <th scope="col">Events</th>
            {["Delivered", "Given up", "Lost", "Waiting"].map((each) => (
              <th scope="col" key={each}>
                {each}
              </th>
            ))}
            <th scope="col">Newest error</th>
          </tr>
        </thead>
        <tbody>
          {data.map((each, at) => (
            <tr key={at}>
              <td>{each.url}</td>
              <td class="wrap">{each.events.join(", ")}</td>
              {[each.delivered, each.failed, each.dropped, each.waiting].map((count, place) => (
                <td class="figure" key={place}>
                  {count}
                </td>
              ))}
              <td class={each.last_error ? "wrap bad" : "wrap"}>{each.last_error ?? "none"}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <p class="quiet small">
        <code>GET /v1/webhooks</code>
      </p>
    </div>
  );
}

function Drain({ service, onDone }: { service: Service; onDone: () => void }) {
  const [isOpen, setOpen] = useState(false);
  return (
    <>
      <button class="plain" onClick={() => setOpen(true)}>
        Drain…
      </button>
      {isOpen && (
        <Dialog
          title={`Drain ${service.service_id}?`}
          verb="Drain"
          isDangerous
          onClose={() => setOpen(false)}
          onDo={async () => {
            await call(`/v1/services/${encodeURIComponent(service.service_id)}/drain`, { method: "POST" });
            onDone();
          }}
        >
          <p>It finishes what it can in 30 seconds, hands the rest over with its tokens, and leaves. It is never assigned again.</p>
        </Dialog>
      )}
    </>
  );
}
