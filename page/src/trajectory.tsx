import { useEffect, useMemo, useState } from "preact/hooks";
import { call, experimentPath, type Sample, type SamplePage } from "./api";
import { duration, number } from "./format";
import { meaningOf } from "./reasons";
import { useGroup, type SetQuery } from "./samples";
import { COLOURINGS, colouringsOf, scaleOf, titleOf, tokensOf, type Colouring } from "./tokens";

const MOST_TOKENS = 20_000;

interface Turn {
  text?: string;
  observation?: string | null;
  reward?: number | null;
  finish_reason?: string;
}

export function Trajectory(props: { experimentId: string; sampleId: string; sample: Sample | null; colouring: string; onSet: SetQuery }) {
  const { members, error } = useGroup(props.experimentId, props.sampleId, props.sample);
  const sample = members?.find((each) => each.id === props.sampleId) ?? props.sample;
  const tokens = useMemo(() => (sample ? tokensOf(sample) : []), [sample]);
  const possible = colouringsOf(tokens);
  const colouring = possible.find((each) => each === props.colouring) ?? "none";
  if (error) return <p class="notice bad">{error}</p>;
  if (!sample) return <p class="quiet">Loading…</p>;
  const facts: [string, string][] = [
    ["reward", number(sample.reward)],
    ...(sample.advantage === null || sample.advantage === undefined ? [] : ([["advantage", number(sample.advantage)]] as [string, string][])),
    ["tokens", String(sample.num_sampled)],
    ["ended by", sample.finish_reason],
    ["sampled by", sample.oldest_version === sample.newest_version ? `version ${sample.newest_version}` : `versions ${sample.oldest_version} to ${sample.newest_version}`],
    ...(sample.lag === null || sample.lag === undefined ? [] : ([["lag", String(sample.lag)]] as [string, string][])),
    ["label", sample.label ?? "none"],
    ["answer found", sample.answer ?? "none"],
    ...Object.entries(sample.timings).map(([name, seconds]): [string, string] => [name.replace(/_seconds$/, "").replaceAll("_", " "), duration(seconds)]),
  ];
  return (
    <article class="trajectory" aria-label="The chosen sample">
      <header>
        <h2>
          {sample.kind}, {sample.step === null ? `version ${sample.version}` : `step ${sample.step}`}, problem {sample.row}, answer {sample.member + 1}
          {members && ` of ${members.length}`}
        </h2>
        <p class="quiet small">
          {sample.id}
          {sample.step !== null && sample.kind === "trained" && (
            <>
              {" · "}
              <a href={`#/lineage/${encodeURIComponent(props.experimentId)}?step=${sample.step}`}>all groups of its step</a>
            </>
          )}
          {sample.data_source && ` · ${sample.data_source}`}
          {sample.is_baseline && " · greedy baseline, not trained"}
        </p>
      </header>
      {sample.ended && (
        <p class="notice warn">
          The group was {sample.kind}: {meaningOf(sample.ended)}
        </p>
      )}
      <dl class="facts">
        {facts.map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
      {(Object.keys(sample.components).length > 0 || sample.reason || Object.keys(sample.metrics).length > 0) && (
        <p class="small">
          {Object.entries(sample.components).map(([name, value]) => (
            <span key={name} class="tag">
              {name} <b>{number(value)}</b>
            </span>
          ))}
          {Object.entries(sample.metrics).map(([name, value]) => (
            <span key={name} class="tag quiet">
              {name} {number(value)}
            </span>
          ))}
          {sample.status !== "scored" && <span class="tag bad">{sample.status}</span>}
          {sample.reason && <q class="grader">{sample.reason}</q>}
        </p>
      )}
      <div class="toolbar small">
        <label>
          Colour tokens by{" "}
          <select value={colouring} disabled={members === null} onChange={(event) => props.onSet({ colour: event.currentTarget.value === "none" ? null : event.currentTarget.value })}>
            {COLOURINGS.filter((each) => possible.includes(each)).map((each) => (
              <option key={each}>{each}</option>
            ))}
          </select>
        </label>
      </div>
      {colouring !== "none" && tokens.length > 0 ? <Tokens sample={sample} colouring={colouring} /> : <Conversation sample={sample} />}
      {members && members.length > 1 && (
        <>
          <h3>Its group</h3>
          <ul class="members">
            {members.map((each) => (
              <li key={each.id}>
                <button class="member" aria-current={each.id === sample.id} onClick={() => props.onSet({ sample: each.id })}>
                  <span class="small">
                    reward <b>{number(each.reward)}</b>
                    {each.advantage !== null && each.advantage !== undefined && <> · advantage {number(each.advantage)}</>} · {each.num_sampled} tokens
                  </span>
                  <span class="words">{each.completion || "(no text)"}</span>
                </button>
              </li>
            ))}
          </ul>
        </>
      )}
      <Elsewhere experimentId={props.experimentId} sample={sample} onSet={props.onSet} />
    </article>
  );
}

function Conversation({ sample }: { sample: Sample }) {
  const messages = sample.messages as { role: string; content: unknown }[];
  const turns = sample.turns as Turn[] | undefined;
  const text = (content: unknown) => (typeof content === "string" ? content : JSON.stringify(content, null, 1));
  return (
    <ol class="conversation">
      {messages.length > 0
        ? messages.map((message, at) => (
            <li key={at} class={message.role}>
              <span class="role">{message.role}</span>
              <div>{text(message.content)}</div>
            </li>
          ))
        : sample.prompt && (
            <li class="user">
              <span class="role">prompt</span>
              <div>{sample.prompt}</div>
            </li>
          )}
      {turns && turns.length > 0 ? (
        turns.flatMap((turn, at) => [
          ...(turn.observation && (at > 0 || messages.length === 0)
            ? [
                <li key={`o${at}`} class="tool">
                  <span class="role">observation</span>
                  <div>{turn.observation}</div>
                </li>,
              ]
            : []),
          <li key={at} class="policy">
            <span class="role">
              policy, turn {at + 1}
              {turn.reward !== null && turn.reward !== undefined && `, reward ${number(turn.reward)}`}
            </span>
            <div>{turn.text}</div>
          </li>,
        ])
      ) : (
        <li class="policy">
          <span class="role">policy</span>
          <div>{sample.completion || "(no text)"}</div>
        </li>
      )}
    </ol>
  );
}

function Tokens({ sample, colouring }: { sample: Sample; colouring: Colouring }) {
  const tokens = useMemo(() => tokensOf(sample), [sample]);
  const scale = useMemo(() => scaleOf(colouring, tokens), [tokens, colouring]);
  const hasTexts = tokens.some((token) => token.text !== "");
  return (
    <div>
      <ul class="legend small">
        {scale.legend.map((each) => (
          <li key={each.label}>
            <i class="swatch" style={{ backgroundColor: each.colour }} />
            {each.label}
          </li>
        ))}
      </ul>
      {!hasTexts && <p class="quiet small">The gateway cannot read the model's tokenizer.json: tokens are shown by their ids.</p>}
      <div class="tokens">
        {tokens.slice(0, MOST_TOKENS).map((token, at) => (
          <span key={at} class={token.isSampled ? "sampled" : "given"} style={{ backgroundColor: scale.colourOf(token) ?? "transparent" }} title={titleOf(token)}>
            {hasTexts ? token.text : `${token.id} `}
          </span>
        ))}
      </div>
    </div>
  );
}

/** The same problem, as other versions answered it. */
function Elsewhere({ experimentId, sample, onSet }: { experimentId: string; sample: Sample; onSet: SetQuery }) {
  const [found, setFound] = useState<Sample[]>([]);
  useEffect(() => {
    const ending = new AbortController();
    call<SamplePage>(`${experimentPath(experimentId)}/samples`, { query: { row: sample.row, kind: sample.kind, limit: 100 }, signal: ending.signal }).then(
      (page) => setFound(page.items),
      () => {},
    );
    return () => ending.abort();
  }, [sample.row, sample.kind]);
  const others = [...new Map(found.filter((each) => each.version !== sample.version).map((each) => [each.version, each])).values()];
  if (others.length === 0) return null;
  return (
    <>
      <h3>The same problem at other versions</h3>
      <ul class="members">
        {others.map((each) => (
          <li key={each.id}>
            <button class="member" onClick={() => onSet({ sample: each.id, row: String(sample.row), step: null, group: null, kind: sample.kind })}>
              <span class="small">
                version {each.version} · reward <b>{number(each.reward)}</b>
              </span>
              <span class="words">{each.completion || "(no text)"}</span>
            </button>
          </li>
        ))}
      </ul>
    </>
  );
}
