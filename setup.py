"""Compiles the kernel when a C compiler is there; without one the same source runs interpreted."""

import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNEL = Path("src/nsquark/kernel")
# The functions of bytes.pxd are compiled into the modules that use them.
KERNEL_MODULES = sorted(path.stem for path in KERNEL.glob("*.py") if path.stem not in ("__init__", "bytes"))


class BuildIfPossible(build_ext):
    """All or nothing: compiled modules know each other's C types, so a compiled and an interpreted one do not mix."""

    def build_extensions(self) -> None:
        try:
            for extension in self.extensions:
                self.build_extension(extension)
        except Exception as error:
            print(f"the kernel is not compiled, it will run interpreted: {error}", file=sys.stderr)
            for extension in self.extensions:
                Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)
            self.extensions = []


setup(
    cmdclass={"build_ext": BuildIfPossible},
    ext_modules=cythonize(
        [
            Extension(
                f"nsquark.kernel.{name}",
                [str(KERNEL / f"{name}.py")],
                extra_compile_args=["-O3", "-g0"],  # debug symbols would treble the wheel
            )
            for name in KERNEL_MODULES
        ],
        build_dir="build",
        language_level=3,
    ),
)
