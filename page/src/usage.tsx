// What an experiment took of each pool of machines, which tokens a hand-over saved, and what a trained token costs.
import { call, experimentPath, usePoll, type Usage } from "./api";
import { number } from "./format";

const SECONDS = 30;

const money = (amount: number | null | undefined, currency: string) => (amount === null || amount === undefined ? "–" : `${number(amount)} ${currency}`.trim());

export function Pools({ id }: { id: string }) {
  const { data } = usePoll((signal) => call<Usage>(`${experimentPath(id)}/usage`, { signal }), SECONDS, `usage ${id}`);
  if (data === null || data.uses.length === 0) return null;
  const costs = data.costs;
  const pools = [...new Set([...data.uses.map((each) => each.pool), ...Object.keys(data.trained_by_pool)])].toSorted();
  const hours = (pool: string) => data.uses.filter((each) => each.pool === pool).reduce((sum, each) => sum + each.hours, 0);
  const devices = (pool: string) => [...new Set(data.uses.filter((each) => each.pool === pool).map((each) => each.device))].join(", ");
  return (
    <div class="panel pools">
      <h2>Pools of machines</h2>
      <table>
        <thead>
          <tr>
            {["Pool", "Devices", "Hours", "Trained tokens", ...(costs ? ["Costs", "Sampling a million"] : [])].map((each) => (
              <th scope="col" key={each}>
                {each}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {pools.map((pool) => {
            const priced = costs?.pools.find((each) => each.pool === pool);
            return (
              <tr key={pool}>
                <td>{pool}</td>
                <td class="quiet">{devices(pool)}</td>
                <td class="figure">{number(hours(pool))}</td>
                <td class="figure">{number(data.trained_by_pool[pool] ?? 0)}</td>
                {costs && <td class="figure">{money(priced?.cost, costs.currency)}</td>}
                {costs && <td class="figure">{money(priced?.per_million, costs.currency)}</td>}
              </tr>
            );
          })}
        </tbody>
      </table>
      <p class="small">
        {number(data.saved_tokens)} tokens saved by hand-over; {number(data.trained_tokens)} of {number(data.generated_tokens)} generated tokens trained
        {costs ? `; ${money(costs.cost, costs.currency)} in all, ${money(costs.per_million, costs.currency)} for a million trained tokens` : ""}.
      </p>
      {data.costs_problem && <p class="small">No costs: {data.costs_problem}.</p>}
      <p class="quiet small">
        <code>GET {experimentPath(id)}/usage</code>, <code>flotilla costs</code>
      </p>
    </div>
  );
}
