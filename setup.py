"""Compiles the kernel when a C compiler is there; without one the same source runs interpreted."""

import sys

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNEL_MODULES = ("arena", "frames", "ledger")


class BuildIfPossible(build_ext):
    """`optional` alone covers a compiler that fails, not one that is missing."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:
            print(f"{ext.name} is not compiled, it will run interpreted: {error}", file=sys.stderr)


setup(
    cmdclass={"build_ext": BuildIfPossible},
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
