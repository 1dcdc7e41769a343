"""Where programs can run beside this machine: each provider makes boxes of an image and runs commands in them."""
