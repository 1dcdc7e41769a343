"""verl: YAML and Hydra overrides, or a launch script; synchronous and fully asynchronous trainers."""
