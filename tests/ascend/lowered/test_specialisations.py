"""The proofs together execute every specialisation that the planner can choose."""

from __future__ import annotations

from ascend_kernels.neighborhood import tiling
from tests.ascend.lowered.neighborhood_gates import specialisation_of
from tests.ascend.lowered.neighborhood_launches import backward_launches, band_launches, flash_launches


def test_every_specialisation_is_executed() -> None:
    """Derived from the case tables by recording their launches; what executes them takes the same tables."""
    executed = {
        specialisation_of(launch) for made in (flash_launches, band_launches, backward_launches) for launch in made()
    }
    listed = set(tiling.specialisations())
    assert not listed - executed, f"no case of the proofs launches {sorted(map(str, listed - executed))}"
    assert not executed - listed, f"not among the specialisations: {sorted(map(str, executed - listed))}"
