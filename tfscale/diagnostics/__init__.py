"""Examine a model: the range of its gradients, non-finite values, dangers in half precision."""
