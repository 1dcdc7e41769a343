"""Tools that a policy may call in the middle of an episode, and the formats that it calls them in."""
