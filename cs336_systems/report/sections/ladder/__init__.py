"""The ladder as tables and pictures: what each rung is worth, and why."""
