// Who changed what: the audit of one experiment.
import { call, experimentPath, type AuditEntry, type Event } from "./api";
import { clock } from "./format";

/** The newest changes of an experiment. */
export const auditOf = async (id: string, signal: AbortSignal): Promise<AuditEntry[]> =>
  (await call<{ items: AuditEntry[] }>(`${experimentPath(id)}/audit`, { query: { limit: 200 }, signal })).items;

/** Facts in a line; what has an inner structure is left to the REST API. */
export function words(data: Event["data"]): string {
  const shown = Object.entries(data).filter(
    ([, value]) => value !== null && (typeof value !== "object" || (Array.isArray(value) && value.every((each) => typeof each !== "object"))),
  );
  return shown.map(([name, value]) => `${name.replaceAll("_", " ")} ${Array.isArray(value) ? value.join(", ") : String(value)}`).join(", ");
}

export function Audit({ entries }: { entries: AuditEntry[] }) {
  return (
    <div class="panel narrow">
      <h2>Who changed what</h2>
      {entries.length === 0 && <p class="quiet">Nothing was changed.</p>}
      <table>
        <tbody>
          {entries.map((each, at) => (
            <tr key={at}>
              <td>{clock(each.at)}</td>
              <td>
                <b>{each.action}</b>
              </td>
              <td>{each.actor}</td>
              <td class="wrap quiet">{words(each.detail)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
