"""What ../budget.py computes from compiled kernels: instructions, pipes, memory and times."""
