"""Write down what this release has; done once for a release, and by nobody else."""

import json

from tests.contract.releases.messages import FOLDER, snapshot, version

(FOLDER / f"{version()}.json").write_text(
    json.dumps(snapshot(), sort_keys=True, separators=(",", ":")) + "\n", encoding="utf-8"
)
