"""Code that the examples share; run the scripts of the folder above."""
