"""Trace a step of one rank on fake CUDA tensors: memory, collectives, FLOPs and waits of the GPU's own code, without a
GPU.
"""
