"""Programs that use the package as its users do: `python examples/train_text.py`. Shared code is in shared/."""
