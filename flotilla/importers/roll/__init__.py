"""ROLL: YAML of the RLVR pipeline; of the agentic pipeline what does not need environments."""
