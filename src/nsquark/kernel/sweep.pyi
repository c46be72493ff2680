"""Only the kernel uses sweeps, by their C types in sweep.pxd."""

from nsquark.kernel.blocks import Blocks

class Sweep:
    def __init__(self, blocks: Blocks) -> None: ...
