"""Parts of ``scripts/compare_kernels.py``: the cases, the kernels, the measurements and what is made of them."""
