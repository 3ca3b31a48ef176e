"""What the kernels of published formats have to compute, in plain PyTorch that imports nothing of ours."""
