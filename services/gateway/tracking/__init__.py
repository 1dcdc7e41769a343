"""What an experiment measures, sent on to the trackers that its spec names."""
