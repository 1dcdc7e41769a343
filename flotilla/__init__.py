"""What users import and type: the command line, the client and the importers of launch files."""
