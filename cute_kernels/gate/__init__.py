"""The gated sum of the three branches, its backward, and the sums of their gradients."""
