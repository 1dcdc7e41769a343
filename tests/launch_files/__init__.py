"""Every launch file of a folder through the importer: ``python -m tests.launch_files DIR [--json] [--system NAME]``."""
