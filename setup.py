"""Compiles the kernel when a C compiler is there; without one the same source runs interpreted."""

import sys

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNEL_MODULES = ("arena", "batch", "columns", "extents", "frames", "ledger", "mpub", "publish")


class BuildIfPossible(build_ext):
    """What cannot be compiled is left out: `optional` alone covers a compiler that fails, not one that is missing."""

    def build_extensions(self) -> None:
        built: list[Extension] = []
        for extension in self.extensions:
            try:
                self.build_extension(extension)
                built.append(extension)
            except Exception as error:
                print(f"{extension.name} is not compiled, it will run interpreted: {error}", file=sys.stderr)
        self.extensions = built


setup(
    cmdclass={"build_ext": BuildIfPossible},
    ext_modules=cythonize(
        [
            Extension(
                f"nsquark.kernel.{name}",
                [f"src/nsquark/kernel/{name}.py"],
                extra_compile_args=["-O3"],
            )
            for name in KERNEL_MODULES
        ],
        build_dir="build",
        language_level=3,
    ),
)
