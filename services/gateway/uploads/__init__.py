"""An experiment's checkpoints, copied to a URL and taken from one."""
