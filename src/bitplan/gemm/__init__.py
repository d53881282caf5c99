"""The geometry of matrix products: operands, passes, summed axes and multiply-accumulates."""
