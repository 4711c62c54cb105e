"""The one part of the build that pyproject.toml cannot say yet: the compiled tables."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "kvatlas.core.tables",
            ["src/kvatlas/core/tables.cpp"],
            extra_compile_args=["-std=c++17", "-O2", "-fno-exceptions", "-fno-rtti"],
        )
    ]
)
