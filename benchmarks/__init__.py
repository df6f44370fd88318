"""What loss scaling costs: workloads, variants, and an interleaved measurement of every pair.

Run `python -m tfscale bench --list` in the repository's root to see what there is to measure.
"""
