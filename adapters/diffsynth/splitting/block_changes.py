"""What a planned run's blocks can compute otherwise, in the order in which it is applied."""

from wanshim.adapters.diffsynth import compiled_blocks, eight_bit_compute

CHANGES = (eight_bit_compute.CHANGE, compiled_blocks.CHANGE)
