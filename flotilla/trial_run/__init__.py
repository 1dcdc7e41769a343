"""A spec scaled down to two steps on this machine: what `flotilla import --try` runs."""
