"""Several training processes as one trainer: who computes what, how weights are sharded, what ranks tell each other."""
