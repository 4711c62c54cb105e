"""The one part of the build that pyproject.toml cannot say yet: what is compiled."""

from pathlib import Path

import nanobind
from setuptools import Extension, setup

NANOBIND = Path(nanobind.source_dir())  # its own part is compiled into ours


def compiled(module: str, *sources: str) -> Extension:
    """A module of the package, made of C++ files that lie beside it."""
    directory = Path("src", *module.split(".")[:-1])
    return Extension(
        module,
        [*(f"{directory}/{name}.cpp" for name in sources), str(NANOBIND / "nb_combined.cpp")],
        include_dirs=[
            nanobind.include_dir(),
            str(NANOBIND.parent / "ext" / "robin_map" / "include"),
        ],
        define_macros=[("NB_COMPACT_ASSERTIONS", None)],
        depends=["src/kvatlas/core/view.h"],
        extra_compile_args=[
            *("-std=c++17", "-O2", "-g0"),
            *("-fno-strict-aliasing", "-fvisibility=hidden"),  # as nanobind asks for
        ],
    )


setup(
    ext_modules=[
        compiled("kvatlas.core._native", "hashing", "native", "tables", "token_ids"),
        compiled("kvatlas.dataplane._copies", "copies"),
    ]
)
