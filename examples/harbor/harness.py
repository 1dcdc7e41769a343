"""A small harness: it asks the policy once and puts the answer where the task wants it.

mini-swe-agent, Claude Code, Codex or any other program takes its place: the variables of its environment are theirs.
"""

import http.client
import json
import os
from pathlib import Path
from urllib.parse import urlsplit


def main() -> None:
    """Play the task in the working directory."""
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.hostname, url.port, timeout=100)
    chat = [{"role": "user", "content": os.environ["INSTRUCTION"]}]
    body = json.dumps({"model": os.environ["MODEL"], "messages": chat})
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    connection.request("POST", f"{url.path}/chat/completions", body, headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    if answer.status != 200:
        raise SystemExit(f"{answer.status}: {text}")
    said = json.loads(text)["choices"][0]["message"]["content"] or ""
    Path("answer.txt").write_text(said.rpartition("####")[2].strip(), encoding="utf-8")


if __name__ == "__main__":
    main()
