"""Programs that use the package as its users do: `python examples/train_text.py`. What they share is in shared/."""
