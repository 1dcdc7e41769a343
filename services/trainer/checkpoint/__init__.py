"""What a trainer keeps on disk, and when."""
