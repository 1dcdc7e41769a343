"""A response that must match a pattern or a JSON schema. Patterns, a schema's too, can take time without bound."""

import sys
from pathlib import Path

from flotilla.services.reward.verifiers.comparing import ComparingVerifier
from flotilla.shared.config.sections.reward import JsonSchemaConfig, RegexConfig

WORKER = Path(__file__).with_name("text_worker.py")


class RegexVerifier(ComparingVerifier):
    """Right is what matches the pattern: that of the section, else the label."""

    def __init__(self, config: RegexConfig) -> None:
        options = {"pattern": config.pattern, "whole": config.whole, "ignore_case": config.ignore_case}
        command = (sys.executable, "-I", str(WORKER), config.kind)
        super().__init__(config, command, needs_label=config.pattern is None, options=options)


class JsonSchemaVerifier(ComparingVerifier):
    """Right is JSON that the schema allows: that of the section, else the label."""

    def __init__(self, config: JsonSchemaConfig) -> None:
        command = (sys.executable, "-I", str(WORKER), config.kind)
        options = {"json_schema": config.json_schema}
        super().__init__(config, command, needs_label=config.json_schema is None, options=options)
