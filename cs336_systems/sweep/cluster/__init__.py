"""A sweep on several machines: what runs where, what a machine runs, and the engine that connects them (Ray)."""
