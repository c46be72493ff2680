"""Compiles the kernel when a C compiler is there; without one the same source runs interpreted."""

from Cython.Build import cythonize
from setuptools import Extension, setup

KERNEL_MODULES = ("arena", "frames", "ledger")

setup(
    ext_modules=cythonize(
        [
            Extension(
                f"nsquark.kernel.{name}",
                [f"src/nsquark/kernel/{name}.py"],
                extra_compile_args=["-O3"],
                optional=True,
            )
            for name in KERNEL_MODULES
        ],
        build_dir="build",
        language_level=3,
    ),
)
