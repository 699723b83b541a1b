"""examples/train_text.py with the loss of every held-out byte after training: a process of torchrun's, or one alone.

python -m tests.support.train_text_losses FILE [arguments of the example]
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from examples import train_text as example


def train(file: str, argv: list[str]) -> int:
    """The example's status; `file` then holds the losses, of whole windows."""
    run = example.Trainer.run

    def run_and_save(self: example.Trainer) -> Any:
        results = run(self)
        with torch.no_grad():
            losses = self.losses(self.validation)
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save(losses, file)
        return results

    with mock.patch.object(example.Trainer, "run", run_and_save):
        return example.main(argv)


if __name__ == "__main__":
    sys.exit(train(sys.argv[1], sys.argv[2:]))
