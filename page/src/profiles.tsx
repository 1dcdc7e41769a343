// What torch's profiler recorded of chosen steps: files to be downloaded, and opened in Perfetto.
import { useState } from "preact/hooks";
import { all, download, experimentPath, usePoll, type Profile } from "./api";

export function Profiles({ id, isOver }: { id: string; isOver: boolean }) {
  const path = `${experimentPath(id)}/profiles`;
  const { data } = usePoll((signal) => all<Profile>(path, { signal }), isOver ? Infinity : 20, id);
  const [error, setError] = useState("");
  if (data === null || data.length === 0) return null;
  const take = (name: string) =>
    download(`${path}/${encodeURIComponent(name)}`, name).then(
      () => setError(""),
      (reason: unknown) => setError(reason instanceof Error ? reason.message : String(reason)),
    );
  return (
    <div class="panel profiles">
      <h2>Profiles</h2>
      {error && <p class="notice bad">{error}</p>}
      <table>
        <tbody>
          {data.map((each) => (
            <tr key={each.name}>
              <td>
                <button class="plain" onClick={() => void take(each.name)}>
                  {each.name}
                </button>
              </td>
              <td class="figure">{Math.ceil(each.size_bytes / 1024).toLocaleString("en")} KiB</td>
            </tr>
          ))}
        </tbody>
      </table>
      <p class="quiet small">
        Chrome traces: Perfetto opens them as they are. <code>GET {path}</code>
      </p>
    </div>
  );
}
