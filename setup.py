"""The one part of the build that pyproject.toml cannot say yet: what is compiled."""

from pathlib import Path

import nanobind
from setuptools import Extension, setup

NANOBIND = Path(nanobind.source_dir())  # its own part is compiled into ours

setup(
    ext_modules=[
        Extension(
            "kvatlas.core._native",
            [
                *(f"src/kvatlas/core/{name}.cpp" for name in ("hashing", "native", "tables")),
                str(NANOBIND / "nb_combined.cpp"),
            ],
            include_dirs=[
                nanobind.include_dir(),
                str(NANOBIND.parent / "ext" / "robin_map" / "include"),
            ],
            define_macros=[("NB_COMPACT_ASSERTIONS", None)],
            extra_compile_args=[
                *("-std=c++17", "-O2", "-g0"),
                *("-fno-strict-aliasing", "-fvisibility=hidden"),  # as nanobind asks for
            ],
        )
    ]
)
