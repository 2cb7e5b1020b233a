"""Memory of a step: what every block of a snapshot was for, and when it was held."""
