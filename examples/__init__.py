"""Example programs that use the public API: `python examples/train_text.py`. Shared code is in shared/."""
