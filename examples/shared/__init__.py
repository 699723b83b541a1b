"""What the examples share: nothing here is run by itself. Run a script of the folder above."""
