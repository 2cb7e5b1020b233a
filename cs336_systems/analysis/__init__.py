"""What happened: readers of profiles and snapshots, statistics, and warnings drawn from raw
times.
"""
