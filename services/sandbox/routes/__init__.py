"""The sandbox's routes, one module per resource."""
