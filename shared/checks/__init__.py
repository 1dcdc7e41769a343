"""What a process of the fleet finds out about its host, and about the way to others."""
