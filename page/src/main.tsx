import { render } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { all, askEarly, call, Refused, session, usePoll, type Caller, type Experiment } from "./api";
import { Create } from "./create";
import { Fleet } from "./fleet";
import { Flow } from "./flow";
import { isJob, Job } from "./job";
import { Lineage } from "./lineage";
import { Log } from "./log";
import { Login } from "./login";
import { Overview } from "./overview";
import { askEarlyForRuns, Run } from "./run";
import { Samples } from "./samples";
import "./app.css";

export interface Shared {
  experiments: Experiment[];
  isOperator: boolean;
  refresh: () => void;
}

/** `#/run/a,b?x=version`: the view, what it is about, and how it looks at it; a link holds all of it. */
export interface Route {
  view: string;
  ids: string[];
  query: URLSearchParams;
}

/** What a link says, which anybody may have written: as it is where it is no encoding. */
function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function routeOf(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split("?");
  const [view = "", ids = ""] = path.split("/");
  return { view: view || "overview", ids: ids.split(",").filter(Boolean).map(decoded), query: new URLSearchParams(query) };
}

const VIEWS = [
  ["run", "Run"],
  ["samples", "Samples"],
  ["flow", "Flow"],
  ["lineage", "Lineage"],
  ["log", "Log"],
] as const;
/** Views of one experiment; the others show several over each other. */
const OF_ONE = new Set<string>(["samples", "flow", "lineage", "log"]);

function useHash(): string {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const changed = () => setHash(location.hash);
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return hash;
}

/** Let the keyboard reach what scrolls by itself, such as wide tables on a narrow screen. */
function useScrollable(key: string): void {
  useEffect(() => {
    const mark = () => {
      for (const each of document.querySelectorAll<HTMLElement>(".panel, .table, .members, .detail")) {
        if (each.scrollWidth > each.clientWidth || each.scrollHeight > each.clientHeight) each.tabIndex = 0;
        else each.removeAttribute("tabindex");
      }
    };
    // What is loaded makes the view longer, and the window makes it narrower.
    const changed = new ResizeObserver(mark);
    changed.observe(document.getElementById("main")!);
    return () => changed.disconnect();
  }, [key]);
}

const THEMES = ["auto", "light", "dark"] as const;
type Theme = (typeof THEMES)[number];

function useTheme(): [Theme, () => void] {
  const [theme, setTheme] = useState<Theme>(() => (THEMES.find((each) => each === localStorage.getItem("flotilla-theme")) ?? "auto"));
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem("flotilla-theme", theme);
    dispatchEvent(new Event("themechange"));
  }, [theme]);
  return [theme, () => setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]!)];
}

function Page({ caller, onLeave }: { caller: Caller; onLeave: () => void }) {
  const hash = useHash();
  const route = useMemo(() => routeOf(hash), [hash]);
  const [theme, nextTheme] = useTheme();
  useScrollable(hash);
  const { data, error, refresh } = usePoll(
    (signal) =>
      caller.experiment_id
        ? call<Experiment>(`/v1/experiments/${encodeURIComponent(caller.experiment_id)}`, { signal }).then((one) => [one])
        : all<Experiment>("/v1/experiments", { query: { spec: false }, signal }),
    3,
    "experiments",
  );
  const isOperator = caller.scope === "operator";
  const ids = route.ids.filter((id) => data?.some((each) => each.id === id));
  const title = ids.map((id) => data?.find((each) => each.id === id)?.name ?? id).join(", ");
  useEffect(() => {
    document.title = title ? `${title} · Flotilla` : "Flotilla";
  }, [title]);
  return (
    <>
      <header class="top">
        <a class="brand" href="#/">
          <img src="/page/icon.svg" alt="" width="24" height="24" />
          Flotilla
        </a>
        <nav aria-label="Views">
          <a href="#/" aria-current={route.view === "overview" ? "page" : undefined}>
            Overview
          </a>
          {caller.experiment_id === null && (
            <a href="#/fleet" aria-current={route.view === "fleet" ? "page" : undefined}>
              Fleet
            </a>
          )}
          {ids.length > 0 && <span class="divider" aria-hidden="true" />}
          {ids.length > 0 &&
            VIEWS.filter(([view]) => view === "run" || !data?.some((each) => each.id === ids[0] && isJob(each))).map(([view, label]) => (
              <a key={view} href={`#/${view}/${(OF_ONE.has(view) ? ids.slice(0, 1) : ids).map(encodeURIComponent).join(",")}`} aria-current={route.view === view ? "page" : undefined}>
                {label}
              </a>
            ))}
        </nav>
        <div class="who">
          <span class={error ? "dot bad" : "dot"} title={error ? error.message : "connected"} role="img" aria-label={error ? "not connected" : "connected"} />
          <span class="quiet">
            {caller.name === caller.scope ? caller.scope : `${caller.name} (${caller.scope})`}
          </span>
          <button class="plain" onClick={nextTheme} title="colours: automatic, light, dark">
            {theme === "auto" ? "Auto" : theme === "light" ? "Light" : "Dark"}
          </button>
          <button class="plain" onClick={onLeave}>
            Log out
          </button>
        </div>
      </header>
      {error && (
        <p class="banner bad" role="alert">
          {error.message}; shown is what was known before.
        </p>
      )}
      <main id="main">
        {data === null ? (
          <p class="quiet">{error ? "" : "Loading…"}</p>
        ) : (
          <View route={route} ids={ids} shared={{ experiments: data, isOperator, refresh }} />
        )}
      </main>
    </>
  );
}

function View({ route, ids, shared }: { route: Route; ids: string[]; shared: Shared }) {
  if (route.view === "overview") return <Overview shared={shared} />;
  if (route.view === "fleet") return <Fleet shared={shared} />;
  if (route.view === "new" && shared.isOperator) return <Create shared={shared} />;
  if (ids.length === 0) {
    return (
      <p>
        There is no such experiment here. <a href="#/">Overview</a>
      </p>
    );
  }
  if (shared.experiments.some((each) => each.id === ids[0] && isJob(each))) return <Job key={ids[0]} id={ids[0]!} shared={shared} />;
  if (route.view === "run") {
    const runs = ids.filter((id) => shared.experiments.some((each) => each.id === id && !isJob(each)));
    return <Run key={runs.join()} ids={runs} route={route} shared={shared} />;
  }
  if (route.view === "samples") return <Samples key={ids[0]} id={ids[0]!} route={route} shared={shared} />;
  if (route.view === "flow") return <Flow key={ids[0]} id={ids[0]!} shared={shared} />;
  if (route.view === "lineage") return <Lineage key={ids[0]} id={ids[0]!} route={route} shared={shared} />;
  if (route.view === "log") return <Log key={ids[0]} id={ids[0]!} route={route} shared={shared} />;
  return (
    <p>
      There is no such view. <a href="#/">Overview</a>
    </p>
  );
}

/** A link of `flotilla page` brings the token along, behind the #, which no server is told. */
function tokenOfLink(): string | null {
  const found = /^#token=(.+)$/.exec(location.hash);
  if (found !== null) history.replaceState(null, "", "#/");
  return found === null ? null : decoded(found[1]!);
}

/** The first view of a tab that is logged in: who is asking, which experiments there are and their charts are asked for at once. */
function askForFirstView(): void {
  if (session.token === null) return;
  const route = routeOf(location.hash);
  // In this order: charts take longest to answer.
  askEarly("/v1/tokens/self");
  askEarly("/v1/experiments", { spec: false });
  if (route.view === "run") askEarlyForRuns(route.ids);
}

function App() {
  const [caller, setCaller] = useState<Caller | null>(null);
  const [message, setMessage] = useState("");
  const [isAsking, setAsking] = useState(session.token !== null || location.hash.startsWith("#token="));
  const enter = async (token: string) => {
    setAsking(true);
    try {
      const found = await call<Caller>("/v1/tokens/self", { token });
      if (found.scope !== "operator" && found.scope !== "reader") throw new Error(`this token has the scope ${found.scope}: the page wants a reader's or an operator's`);
      session.token = token;
      setMessage("");
      setCaller(found);
    } catch (error) {
      // A gateway that does not answer now, such as one that restarts, may know the token later.
      if (error instanceof Refused && error.status === 401) session.token = null;
      setMessage(error instanceof Error ? error.message : String(error));
    }
    setAsking(false);
  };
  useEffect(() => {
    session.onLost = () => {
      session.token = null;
      setCaller(null);
      setMessage("The token was revoked or has expired.");
    };
    // A link is anybody's: it logs in who is not, or no longer, and changes nobody's login. It is taken out of the address all the same.
    const ofLink = tokenOfLink();
    void (async () => {
      if (session.token !== null) await enter(session.token);
      if (session.token === null && ofLink !== null) await enter(ofLink);
    })();
  }, []);
  if (caller !== null) {
    return (
      <Page
        caller={caller}
        onLeave={() => {
          session.token = null;
          setCaller(null);
          setMessage("");
        }}
      />
    );
  }
  return isAsking ? <p class="quiet center">Connecting…</p> : <Login message={message} onEnter={enter} />;
}

askForFirstView();
render(<App />, document.getElementById("app")!);
