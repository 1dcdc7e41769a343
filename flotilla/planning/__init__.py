"""What a run would do with other settings: predicted from its own records by simulation."""
