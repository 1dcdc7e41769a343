"""Examinations of the whole fleet: what its services are asked to try, and what their answers mean."""
