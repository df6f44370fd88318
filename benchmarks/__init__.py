"""What loss scaling costs: workloads, variants, and an interleaved measurement of every pair.

`python -m benchmarks --list`, in the root of the repository, shows what there is to measure.
"""
