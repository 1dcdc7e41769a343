"""Several training processes as one trainer: division of work, sharding of weights, messages between ranks."""
