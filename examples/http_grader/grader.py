"""A grader behind a URL: an answer is right if the number after the last `####` is the label. Standard library only.

With GRADER_SECRET set it refuses requests that are not signed with it, or were signed more than five minutes ago.
"""

import hashlib
import hmac
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECRET = os.environ.get("GRADER_SECRET", "").encode()
OLDEST_SECONDS = 300
MAX_BYTES = 64 * 1024 * 1024


def grade(sample: dict) -> dict:
    """Grade one sample; without a label there is nothing to tell: an abstention, which is no zero."""
    if sample["label"] is None:
        return {"reward": None, "reason": "there is no label"}
    answer = sample["response"].rpartition("####")[2].strip()
    is_right = answer == sample["label"]
    why = "right" if is_right else f"{answer!r} is not {sample['label']!r}"
    return {
        "reward": float(is_right),
        "reason": why,
        "answer": answer,
        "metrics": {"characters": len(sample["response"])},
    }


def is_signed(headers, body: bytes) -> bool:
    """Tell whether the holder of the secret made this request, and lately."""
    timestamp = headers.get("X-Flotilla-Timestamp", "")
    expected = "sha256=" + hmac.new(SECRET, timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()
    is_ours = hmac.compare_digest(headers.get("X-Flotilla-Signature", "").encode(), expected.encode())
    return is_ours and timestamp.isdigit() and abs(time.time() - int(timestamp)) < OLDEST_SECONDS


class Grader(BaseHTTPRequestHandler):
    """Answers each request by one grade per sample, in its order."""

    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", -1))
        if not 0 <= length <= MAX_BYTES:
            self.answer(413, {"error": f"a body has at most {MAX_BYTES} bytes, and says how many"})
            return
        body = self.rfile.read(length)
        if SECRET and not is_signed(self.headers, body):
            self.answer(401, {"error": "the signature is not right, or old"})
            return
        try:
            request = json.loads(body)
            grades = [grade(sample) for sample in request["samples"]]
        except (ValueError, KeyError, TypeError) as error:
            self.answer(400, {"error": f"not a grading request: {error!r}"})
            return
        self.answer(200, {"id": request["id"], "grades": grades})

    def answer(self, status: int, content: dict) -> None:
        """Send JSON."""
        body = json.dumps(content).encode()
        self.send_response(status)
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
