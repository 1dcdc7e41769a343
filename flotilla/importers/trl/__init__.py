"""TRL: its scripts and configurations as launch files."""
