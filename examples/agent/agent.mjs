// An agent that is trained while it works, with the `openai` package for Node: npm install openai
//
//     node examples/agent/agent.mjs EXPERIMENT
//
// FLOTILLA_TOKEN is that of the fleet, or one of the scope `agent`.

import OpenAI from "openai";

const gateway = process.env.FLOTILLA_GATEWAY_URL ?? "http://127.0.0.1:8470";
const experiment = process.argv[2];
const NO_MORE = new Set([401, 403, 404, 409]);

async function call(url, token, body) {
  const headers = { Authorization: `Bearer ${token}`, "Content-Type": "application/json" };
  const answer = await fetch(url, { method: "POST", headers, body: JSON.stringify(body) });
  return [answer.status, await answer.json()];
}

// The part that is yours: solve the task with the client, and say how good that was.
async function work(task, client, model) {
  const reply = await client.chat.completions.create({ model, messages: task.messages });
  const answer = (reply.choices[0].message.content ?? "").split("####").at(-1).trim();
  return answer === task.label ? 1 : 0;
}

async function agent() {
  let done = 0;
  for (;;) {
    const url = `${gateway}/v1/experiments/${experiment}/episodes`;
    const [status, episode] = await call(url, process.env.FLOTILLA_TOKEN, { wait_seconds: 20 });
    if (NO_MORE.has(status)) return done;
    if (status !== 201) {
      await new Promise((resolve) => setTimeout(resolve, 1000));
      continue;
    }
    try {
      const client = new OpenAI({ baseURL: episode.base_url, apiKey: episode.key });
      const reward = await work(episode.task, client, episode.model);
      const [ended] = await call(`${gateway}/v1/episodes/${episode.episode_id}/complete`, episode.key, { reward });
      done += ended === 200 ? 1 : 0;
    } catch (error) {
      console.log(`episode given up: ${error.message}`); // its lease ends, and somebody else gets the task
    }
  }
}

const done = await Promise.all(Array.from({ length: 16 }, agent));
console.log(`${done.reduce((sum, each) => sum + each, 0)} episodes`);
