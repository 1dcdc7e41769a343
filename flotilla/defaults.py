"""Where a local fleet is found, unless said otherwise."""

DEFAULT_DATA = ".flotilla"
DEFAULT_PORT = 8470
