"""A grader behind a URL: an answer is right if the number after the last `####` is the label. Standard library only."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def grade(sample: dict) -> dict:
    """Grade one sample; `reward: null` would be an abstention, which is no zero."""
    answer = sample["response"].rpartition("####")[2].strip()
    is_right = answer == sample["label"]
    why = "right" if is_right else f"{answer!r} is not {sample['label']!r}"
    return {
        "reward": float(is_right),
        "reason": why,
        "answer": answer,
        "metrics": {"characters": len(sample["response"])},
    }


class Grader(BaseHTTPRequestHandler):
    """Answers each request by one grade per sample, in its order."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"id": request["id"], "grades": [grade(sample) for sample in request["samples"]]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing of each request."""


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8900
    print(f"grading at http://127.0.0.1:{port}/", flush=True)
    ThreadingHTTPServer(("127.0.0.1", port), Grader).serve_forever()
