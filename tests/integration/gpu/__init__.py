"""What only a GPU can show, a file a step of ``scripts/gpu_check``; the same runs on CPUs, by ``make soak``."""
