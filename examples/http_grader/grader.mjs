// A grader behind a URL: an answer is right if the number after the last `####` is the label. Node's own modules only.
//
// With GRADER_SECRET set it refuses requests that are not signed with it, or were signed more than five minutes ago.

import { createHmac, timingSafeEqual } from "node:crypto";
import { createServer } from "node:http";

const SECRET = process.env.GRADER_SECRET ?? "";
const OLDEST_SECONDS = 300;
const MAX_BYTES = 64 * 1024 * 1024;

// Without a label there is nothing to tell: an abstention, which is no zero.
function grade(sample) {
  if (sample.label === null) return { reward: null, reason: "there is no label" };
  const answer = sample.response.slice(sample.response.lastIndexOf("####") + 4).trim();
  const isRight = sample.response.includes("####") && answer === sample.label;
  return { reward: isRight ? 1 : 0, answer, metrics: { characters: sample.response.length } };
}

function isSigned(headers, body) {
  const timestamp = headers["x-flotilla-timestamp"] ?? "";
  const mac = createHmac("sha256", SECRET).update(`${timestamp}.`).update(body).digest("hex");
  const [expected, given] = [Buffer.from(`sha256=${mac}`), Buffer.from(headers["x-flotilla-signature"] ?? "")];
  const isOurs = expected.length === given.length && timingSafeEqual(expected, given);
  return isOurs && Math.abs(Date.now() / 1000 - Number(timestamp)) < OLDEST_SECONDS;
}

async function bodyOf(request) {
  const pieces = [];
  let size = 0;
  for await (const piece of request) {
    size += piece.length;
    if (size > MAX_BYTES) return null;
    pieces.push(piece);
  }
  return Buffer.concat(pieces);
}

async function answerOf(request) {
  const body = await bodyOf(request);
  if (body === null) return [413, { error: `a body has at most ${MAX_BYTES} bytes` }];
  if (SECRET && !isSigned(request.headers, body)) return [401, { error: "the signature is not right, or old" }];
  try {
    const { id, samples } = JSON.parse(body.toString("utf8"));
    return [200, { id, grades: samples.map(grade) }];
  } catch (error) {
    return [400, { error: `not a grading request: ${error.message}` }];
  }
}

const port = Number(process.argv[2] ?? 8900);
const server = createServer(async (request, response) => {
  const [status, content] = await answerOf(request);
  response.writeHead(status, { "Content-Type": "application/json" }).end(JSON.stringify(content));
});
server.requestTimeout = 60_000;
server.listen(port, "127.0.0.1", () => console.log(`grading at http://127.0.0.1:${port}/`));
