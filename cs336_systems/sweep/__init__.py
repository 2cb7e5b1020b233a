"""Many runs: worker processes, the records on disk, locks, interrupts, nsys, and the ladder."""
