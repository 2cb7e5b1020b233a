"""One run in one process: its steps, their clock, and what is observed beside them."""
