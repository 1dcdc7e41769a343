"""Programs and sessions in the boxes of a provider: the same answers as of this machine's own isolation."""
