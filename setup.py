"""The packages of the distribution for setuptools, and the libraries of a wheel that needs no compiler.

The top-level folders are installed as `baton.actors`, `baton.api`, …: pyproject.toml cannot add the prefix `baton.` to
found packages. Everything else about the distribution is there.

With BATON_PREBUILD a wheel gets native code: "all" compiles for each target of this machine's architecture, and
"x86-64-v3,x86-64-v4" for these. Without it the wheel is for any platform, and native code is compiled at the first
start of a server.
"""

import os
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
FOLDERS = ("actors", "api", "kernels", "models")
CPP = "baton.kernels.runtime.cpp"
OLDEST_GLIBC = 17  # of 2.17: no manylinux tag of pip is older
NEEDED_GLIBC = re.compile(rb"\0GLIBC_2\.(\d+)")


def import_alone(name: str) -> ModuleType:
    """Import a module of CPP without the packages around it, which need torch. A build may have no torch."""
    parts = CPP.split(".")
    for depth in range(1, len(parts) + 1):
        package = ModuleType(".".join(parts[:depth]))
        package.__path__ = [str(ROOT.joinpath(*parts[1:depth]))]
        sys.modules.setdefault(package.__name__, package)
    return import_module(f"{CPP}.{name}")


def compile_libraries(names: str, folder: Path) -> None:
    """Compile the library of each target in `names`, or of all if that is "all", into a folder."""
    known = import_alone("targets")
    targets = {each.name: each for each in known.TARGETS if each.machine == known.machine()}
    chosen = list(targets) if names == "all" else [name.strip() for name in names.split(",")]
    if unknown := set(chosen) - targets.keys():
        sys.exit(f"BATON_PREBUILD: {', '.join(sorted(unknown))}: expected all, or some of {', '.join(targets)}")
    compiler = import_alone("compiler").find_compiler()
    if compiler is None:
        sys.exit("BATON_PREBUILD: there is no C++ compiler (CXX, c++, g++ or clang++)")
    folder.mkdir(parents=True)
    for name in chosen:
        path = import_alone("build").build_prebuilt(compiler, targets[name], folder)
        print(f"{path.name}: {path.stat().st_size} bytes, by {compiler.version}")


class DistributionWithLibraries(Distribution):
    """A distribution whose files depend on the platform if it has libraries. It has no extension modules of Python."""

    def has_ext_modules(self) -> bool:
        return bool(os.environ.get("BATON_PREBUILD"))


class BuildWithLibraries(build_py):
    """The copy of the packages into the build folder, with the libraries."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib, *CPP.split("."), "prebuilt")
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier build
        if names := os.environ.get("BATON_PREBUILD"):
            compile_libraries(names, folder)


class WheelWithLibraries(bdist_wheel):
    """A wheel for one platform if it has libraries, else for any."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", self.platform_tag(platform))

    def platform_tag(self, platform: str) -> str:
        """Return the manylinux tag (PEP 600) of the newest glibc that a library needs; otherwise `platform`."""
        build = self.get_finalized_command("build_py")
        libraries = Path(build.build_lib, *CPP.split("."), "prebuilt").glob("*.so")
        versions = [int(minor) for path in libraries for minor in NEEDED_GLIBC.findall(path.read_bytes())]
        return re.sub("^linux", f"manylinux_2_{max(OLDEST_GLIBC, *versions)}", platform) if versions else platform


setup(
    packages=[f"baton.{name}" for name in find_packages(include=[f"{folder}*" for folder in FOLDERS])],
    package_dir={f"baton.{folder}": folder for folder in FOLDERS},
    distclass=DistributionWithLibraries,
    cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": WheelWithLibraries},
)
