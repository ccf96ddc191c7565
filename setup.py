"""Compiles the native kernels (src/slipstream/ops/csrc) into the package where a C compiler is present.

The library is plain C with a C ABI, called through ctypes: it depends on neither Python's nor torch's
headers, so one wheel serves every Python version of a platform. Without a compiler, or when compiling fails,
the install goes on and slipstream uses its torch twins. Everything else about the package is in
pyproject.toml; how to compile, in ops/build.py.
"""

import importlib.util
import logging
import re
import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

OPS = Path("src/slipstream/ops")

spec = importlib.util.spec_from_file_location("slipstream_ops_build", OPS / "build.py")
assert spec is not None and spec.loader is not None
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)


class BuildKernels(build_ext):
    """Puts libslipstream_ops.so beside ops/build.py: in the wheel, or in the source tree if editable."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1], build.LIBRARY))

    def build_extension(self, ext: Extension) -> None:
        compiler = build.find_compiler()
        assert compiler is not None, "the extension is only declared where a compiler is"
        target, built = Path(self.get_ext_fullpath(ext.name)), OPS / build.LIBRARY
        if built.is_file() and build.source_hash().encode() in built.read_bytes():  # by another environment's editable install
            if target.resolve() != built.resolve():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(built, target)
            return
        try:
            build.compile_library(target, compiler)
        except (build.BuildError, OSError) as error:
            logging.getLogger(__name__).warning("slipstream: the native kernels were not built: %s", error)


class PlatformWheel(bdist_wheel):
    """Tags the wheel with its platform alone: the kernels do not depend on the Python version. On Linux the tag is that of the
    newest version of glibc (PEP 600) that a function of the library needs, so that the wheel installs wherever it loads.
    """

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, plat = super().get_tag()
        if self.root_is_pure:
            return python, abi, plat
        library = Path(self.bdist_dir, "slipstream", "ops", build.LIBRARY)
        needed = re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes()) if library.is_file() else []
        if needed and plat.startswith("linux_"):
            major, minor = max((int(major), int(minor)) for major, minor in needed)
            plat = plat.replace("linux", f"manylinux_{major}_{max(minor, 17)}", 1)
        return "py3", "none", plat


kernels = Extension(
    "slipstream.ops.libslipstream_ops",
    sources=[str(OPS / "csrc" / name) for name in build.SOURCES],
    depends=[str(path) for path in sorted((OPS / "csrc").glob("*.h"))],
    optional=True,
)

setup(ext_modules=[kernels] if build.find_compiler() else [], cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel})
