// How the page talks to the gateway: one fetch, one error, one way to poll. The token lives in the tab's session alone.
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import type { components } from "./openapi";

type Schemas = components["schemas"];
export type Experiment = Schemas["ExperimentView"];
export type Caller = Schemas["CallerView"];
export type Finding = Schemas["HealthFinding"];
export type Checkpoint = Schemas["ListedCheckpoint"];
export type SeriesPage = Schemas["SeriesPage"];
export type SamplePage = Schemas["SamplePage"];
export type Sample = Schemas["SampleView"];
export type Event = Schemas["Event"];
export type EventPage = Schemas["Page_Event_"];
export type AuditEntry = Schemas["AuditEntry"];
export type Step = Schemas["StepView"];
export type FleetView = Schemas["FleetView"];
export type Service = Schemas["ServiceView"];
export type ServiceLogLines = Schemas["ServiceLogLines"];
export type Diagnosis = Schemas["DiagnosisView"];
export type Webhook = Schemas["WebhookView"];
export type Usage = Schemas["Usage"];
export type Profile = Schemas["ProfileView"];

const KEY = "flotilla-token";

export interface FieldError {
  path: string;
  allowed: string;
}

/** What a request came to when it was refused (RFC 9457). */
export class Refused extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    detail: string,
    readonly errors: FieldError[] = [],
  ) {
    super(detail);
  }
}

export const session = {
  get token(): string | null {
    return sessionStorage.getItem(KEY);
  },
  set token(value: string | null) {
    // What an earlier token asked for is no answer to this one.
    if (value !== session.token) early.clear();
    if (value === null) sessionStorage.removeItem(KEY);
    else sessionStorage.setItem(KEY, value);
  },
  /** Called when the gateway does not know the token any more. */
  onLost: () => {},
};

export interface Options {
  method?: string;
  query?: Record<string, string | number | boolean | null | undefined>;
  json?: unknown;
  text?: string;
  signal?: AbortSignal;
  token?: string;
}

/** Requests that were made before anything needs their answers, by URL; each answer is used once. */
const early = new Map<string, Promise<Response>>();

const urlOf = (path: string, options: Options): string => {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(options.query ?? {})) {
    if (value !== null && value !== undefined && value !== "") query.set(name, String(value));
  }
  return query.size > 0 ? `${path}?${query}` : path;
};

const bearer = (token: string | null | undefined) => ({ Authorization: `Bearer ${token ?? ""}` });

/** Ask for what a view will want, while what comes before it is still on its way. */
export function askEarly(path: string, query: Options["query"] = {}): void {
  const url = urlOf(path, { query });
  const answer = fetch(url, { headers: bearer(session.token), cache: "no-store" });
  answer.catch(() => early.delete(url));
  early.set(url, answer);
}

export async function call<T>(path: string, options: Options = {}): Promise<T> {
  const asking = options.token ?? session.token;
  const headers: Record<string, string> = bearer(asking);
  let body: string | undefined;
  if (options.text !== undefined) {
    headers["Content-Type"] = "application/yaml";
    body = options.text;
  } else if (options.json !== undefined) {
    headers["Content-Type"] = "application/json";
    body = JSON.stringify(options.json);
  }
  const url = urlOf(path, options);
  const isOwn = asking === session.token;
  const asked = (options.method ?? "GET") === "GET" && isOwn ? early.get(url) : undefined;
  early.delete(url);
  let answer: Response;
  try {
    answer = await (asked ?? fetch(url, { method: options.method ?? "GET", headers, body, signal: options.signal, cache: "no-store" }));
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Refused(0, "unreachable", "the gateway does not answer");
  }
  if (answer.status === 204) return undefined as T;
  const text = await answer.text();
  let document: unknown = null;
  try {
    document = JSON.parse(text);
  } catch {
    // Something between the gateway and this page answered.
  }
  if (answer.ok && document !== null) return document as T;
  const problem = (document ?? {}) as { code?: string; detail?: string; errors?: FieldError[] };
  if (answer.status === 401 && options.token === undefined && asking === session.token) session.onLost();
  throw new Refused(answer.status, problem.code ?? "", problem.detail ?? `${answer.status} ${answer.statusText}`, problem.errors);
}

/** Save a file of the gateway, which wants the token for it, on the reader's machine. */
export async function download(path: string, name: string): Promise<void> {
  const answer = await fetch(path, { headers: bearer(session.token), cache: "no-store" });
  if (!answer.ok) throw new Refused(answer.status, "", `${name}: ${answer.status} ${answer.statusText}`);
  save(name, await answer.blob());
}

/** Save something under a name on the reader's machine. */
export function save(name: string, content: Blob): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export const experimentPath = (id: string) => `/v1/experiments/${encodeURIComponent(id)}`;

/** All of a list, page after page. */
export async function all<T>(path: string, options: Options = {}): Promise<T[]> {
  const found: T[] = [];
  let after: string | null | undefined;
  do {
    const page: { items: T[]; next?: string | null } = await call(path, { ...options, query: { ...options.query, after } });
    found.push(...page.items);
    after = page.next;
  } while (after);
  return found;
}

const SLOWEST_SECONDS = 60;

export interface Polled<T> {
  data: T | null;
  error: Refused | null;
  refresh: () => void;
}

/** Load now and again every so many seconds; seldom while nobody looks or while it fails. */
export function usePoll<T>(load: (signal: AbortSignal) => Promise<T>, seconds: number, key: string): Polled<T> {
  const [data, setData] = useState<{ key: string; value: T } | null>(null);
  const [error, setError] = useState<Refused | null>(null);
  const latest = useRef(load);
  latest.current = load;
  const now = useRef<() => void>(() => {});
  useEffect(() => {
    const ending = new AbortController();
    let timer: ReturnType<typeof setTimeout> | undefined;
    let failures = 0;
    let isBusy = false;
    const plan = () => {
      clearTimeout(timer);
      const wait = document.hidden ? SLOWEST_SECONDS : Math.min(SLOWEST_SECONDS, seconds * 2 ** Math.min(failures, 5));
      if (Number.isFinite(wait)) timer = setTimeout(run, wait * 1000);
    };
    const run = async () => {
      if (isBusy) return;
      isBusy = true;
      try {
        const value = await latest.current(ending.signal);
        if (ending.signal.aborted) return;
        failures = 0;
        setData({ key, value });
        setError(null);
      } catch (reason) {
        if (ending.signal.aborted) return;
        failures += 1;
        setError(reason instanceof Refused ? reason : new Refused(0, "page", String(reason)));
      } finally {
        isBusy = false;
      }
      plan();
    };
    const seen = () => {
      if (!document.hidden) void run();
    };
    now.current = () => void run();
    document.addEventListener("visibilitychange", seen);
    void run();
    return () => {
      ending.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", seen);
    };
  }, [key, seconds]);
  const refresh = useCallback(() => now.current(), []);
  // What was loaded for another key is of no use.
  return { data: data !== null && data.key === key ? data.value : null, error, refresh };
}
