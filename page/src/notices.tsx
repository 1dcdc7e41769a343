import type { Experiment, Finding } from "./api";
import { clock, number, plural } from "./format";

/** What is wrong with an experiment: what stops it, and what the health checks see. */
export function Notices({ experiment }: { experiment: Experiment }) {
  return (
    <>
      {experiment.problem && (
        <p class="notice bad">
          <strong>{experiment.problem.component}</strong> {experiment.problem.cause} <span class="quiet small">since {clock(experiment.problem.at)}</span>
        </p>
      )}
      {experiment.health?.map((finding) => <Health key={finding.check} finding={finding} />)}
    </>
  );
}

function Health({ finding }: { finding: Finding }) {
  const samples = finding.samples ?? [];
  return (
    <details class="notice warn">
      <summary>
        <strong>{finding.check}</strong> {finding.seen} <span class="quiet small">{finding.component}, since step {finding.since_step}</span>
      </summary>
      <p>{finding.advice}</p>
      {finding.command && <pre>{finding.command}</pre>}
      {samples.length > 0 && <p class="quiet small">{plural(samples.length, "sample")}:</p>}
      {samples.map((sample, at) => (
        <pre key={at}>
          {sample.prompt}
          <mark>{sample.completion}</mark>
          {`\nreward ${number(sample.reward)}${sample.audit_reward == null ? "" : `, second grade ${number(sample.audit_reward)}`}, label ${sample.label ?? "none"}, answer ${sample.answer ?? "none"}${sample.reason ? `, ${sample.reason}` : ""}`}
        </pre>
      ))}
    </details>
  );
}
