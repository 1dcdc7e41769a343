"""A response that must match a pattern or a JSON schema. Patterns, a schema's too, can take time without bound."""

from flotilla.services.reward.verifiers.comparing import ComparingVerifier
from flotilla.shared.children.processes import python_module
from flotilla.shared.config.sections.reward import JsonSchemaConfig, RegexConfig

WORKER = python_module("flotilla.services.reward.verifiers.text_worker")


class RegexVerifier(ComparingVerifier):
    """Right is what matches the pattern: that of the section, else the label."""

    def __init__(self, config: RegexConfig) -> None:
        options = {"pattern": config.pattern, "whole": config.whole, "ignore_case": config.ignore_case}
        super().__init__(config, WORKER, config.kind, needs_label=config.pattern is None, options=options)


class JsonSchemaVerifier(ComparingVerifier):
    """Right is JSON that the schema allows: that of the section, else the label."""

    def __init__(self, config: JsonSchemaConfig) -> None:
        options = {"json_schema": config.json_schema}
        super().__init__(config, WORKER, config.kind, needs_label=config.json_schema is None, options=options)
