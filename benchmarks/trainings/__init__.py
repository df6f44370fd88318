"""Real trainings: what becomes of them in float32, in half precision, and with a scaled loss.

`python -m benchmarks.trainings --help`, in the root of the repository, shows what there is to run.
"""
